"""Budgets of thoughts as a part of the server."""

from typing import TYPE_CHECKING, Final

import msgspec

from engine.plugins.kinds import LOGITS_PROCESSOR, named
from engine.text.codec import TextCodec
from engine.text.reasoning import MarkedReasoning
from engine.types.errors import FieldError, RequestError
from engine.types.params import MAX_TOKEN_COUNT
from server.run.extension import Extension, ServerParts

if TYPE_CHECKING:
    from engine.control.system import System

PROCESSOR: Final = "thinking_budget"
FIELD: Final = "thinking_token_budget"
EFFORT: Final = "reasoning_effort"
# The tokens that Gemini's API gives to each effort.
EFFORT_BUDGETS: Final = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24576}


class ThoughtMarks(msgspec.Struct, frozen=True):
    """The tokens around a model's thoughts.  reads_effort: the chat template does something with the effort itself."""

    opens: int
    closes: int
    reads_effort: bool

    def limit(self, budget: int) -> dict[str, str]:
        """Returns the logits processors of a request that may think for so many tokens.  Raises RequestError."""
        if not 0 <= budget <= MAX_TOKEN_COUNT:
            raise FieldError(FIELD, f"{budget}: must be from 0 to {MAX_TOKEN_COUNT}")
        given = {"tokens": budget, "opens": self.opens, "closes": self.closes}
        return {PROCESSOR: msgspec.json.encode(given).decode()}


def find_marks(codec: TextCodec) -> ThoughtMarks | None:
    """Returns the tokens around thoughts; None if there are none, or if a marker is several tokens."""
    form = codec.formats.reasoning
    if not isinstance(form, MarkedReasoning):
        return None
    try:
        opens, closes = (
            codec.encode(markers[0], add_special_tokens=False).tolist() for markers in (form.opens, form.closes)
        )
    except RequestError:
        return None  # without a tokenizer
    if len(opens) != 1 or len(closes) != 1:
        return None
    return ThoughtMarks(opens[0], closes[0], EFFORT in codec.template_source)


class ThinkingBudgetExtension(Extension):
    """``thinking_token_budget`` and the like."""

    def describe(self, system: "System") -> dict[str, bytes]:
        chosen = named(system.engine.config.plugins, LOGITS_PROCESSOR)
        if not isinstance(chosen, list) or PROCESSOR not in chosen:
            return {}
        marks = find_marks(system.engine.codec)
        return {} if marks is None else {PROCESSOR: msgspec.msgpack.encode(marks)}

    def join(self, parts: ServerParts) -> None:
        if (known := parts.translator.card.parts.get(PROCESSOR)) is not None:
            marks = msgspec.msgpack.decode(known, type=ThoughtMarks)
            parts.translator.limit_thoughts = marks.limit
            if not marks.reads_effort:
                parts.translator.effort_budgets = EFFORT_BUDGETS


EXTENSION = ThinkingBudgetExtension()
