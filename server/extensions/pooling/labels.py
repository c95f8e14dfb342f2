"""POST /v1/score with ``label_token_ids``: how likely given tokens come after texts, as SGLang has it.

Owns: the prompts of a query and items, and scores from log probabilities.
Does not know: how a model computes them, and models that score pairs, which ``pairs.py`` serves at the same path.
"""

from collections.abc import Sequence
from math import exp
from typing import ClassVar, Final

from engine.types.errors import FieldError
from engine.types.prompt import Prompt
from server.extensions.pooling.pairs import LabelScores, ScoreBody, ScorePairs
from server.extensions.pooling.requests import PooledUsage, pooled
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter, finite
from server.http.operation import Operation
from server.openai.requests import GenerationBody
from server.openai.translator import Translator

MOST_CHARS: Final = 1 << 24  # or tokens, of all prompts together: the query is in each


class ScoreLabels(Endpoint[ScoreBody]):
    """POST /v1/score of a model that generates."""

    operation: ClassVar[Operation] = ScorePairs.operation
    body_type = ScoreBody

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: ScoreBody) -> Generation:
        if body.label_token_ids is None:
            self._translator.card.use.check(ScorePairs.task, f"{ScorePairs.refusal}, only label_token_ids")
        if not body.label_token_ids:
            raise FieldError("label_token_ids", "at least one token is needed")
        if body.add_special_tokens is False:
            raise FieldError("add_special_tokens", "false; send token ids for prompts without the tokenizer's own")
        query, items = _asked(body)
        self._translator.check_count(len(items), 1, "items")
        if (total := sum(len(query) + len(item) for item in items)) > MOST_CHARS:
            raise FieldError(
                "items",
                f"with the query before each they have {total} characters or tokens; at most {MOST_CHARS} may be",
            )
        prompts = tuple(_joined(query, item, item_first=bool(body.item_first)) for item in items)
        asked = GenerationBody(
            model=body.model or self._translator.card.name,
            temperature=0.0,
            logprob_token_ids=body.label_token_ids,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            priority=body.priority,
            cache_salt=body.cache_salt,
            user=body.user,
            request_id=body.request_id,
        )
        return self._translator.translate(asked, prompts, max_tokens=1, logprobs=0, counted="items")

    def rename(self, field: str, body: ScoreBody) -> str:
        return {"prompt": "items", "logprob_token_ids": "label_token_ids"}.get(field, field)

    def writer(self, body: ScoreBody, generation: Generation, usage: UsageCounter) -> "LabelWriter":
        return LabelWriter(self._translator.card.name, body, usage)


class LabelWriter(Writer):
    """Writes the probabilities of the labels after each prompt."""

    id = ""

    def __init__(self, model: str, body: ScoreBody, usage: UsageCounter) -> None:
        self._model = model
        self._body = body
        self._usage = usage

    def whole(self, outputs: Sequence[Output]) -> LabelScores:
        pooled(outputs)
        scores = [self._scores(output) for output in outputs]
        return LabelScores(scores=scores, model=self._model, usage=PooledUsage.of(self._usage))

    def _scores(self, output: Output) -> list[float]:
        (entry,) = output.delta.logprobs
        by_token = {token.token_id: finite(token.logprob) for token in entry.top}
        values = [by_token[token_id] for token_id in self._body.label_token_ids or ()]
        if not self._body.apply_softmax:
            return [exp(value) for value in values]
        powers = [exp(value - max(values)) for value in values]
        return [power / sum(powers) for power in powers]


def _asked(body: ScoreBody) -> tuple[str | list[int], list[str | list[int]]]:
    """Returns the query and the items.  Raises RequestError."""
    if body.query is None or body.items is None:
        missing = "query" if body.query is None else "items"
        raise FieldError(missing, "required beside label_token_ids, but not given")
    items: list[str | list[int]] = [body.items] if isinstance(body.items, str) else body.items
    if not items:
        raise FieldError("items", "an empty list; expected at least one")
    return body.query, items


def _joined(query: str | list[int], item: str | list[int], *, item_first: bool) -> Prompt:
    """Returns the prompt of an item.  Raises RequestError."""
    if isinstance(query, str) and isinstance(item, str):
        return item + query if item_first else query + item
    if isinstance(query, list) and isinstance(item, list):
        return item + query if item_first else query + item
    raise FieldError("items", "texts beside token ids; the query and all items must be of one kind")
