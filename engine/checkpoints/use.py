"""The use of a model: what requests may ask of it.

Owns: the tasks, the parameters of requests that want numbers in place of text, the refusal of any other task.
Does not know: how a checkpoint states its use, which features add tasks, how numbers are computed.
"""

from typing import Final, Literal

import msgspec

from engine.types.errors import RequestError
from engine.types.params import SamplingParams

Kind = Literal["generate", "embed", "classify"]
PLAIN: Final = SamplingParams(max_tokens=1, temperature=0.0)


class Calls(msgspec.Struct, frozen=True):
    """The calls for a task.  methods: of ``LLM``.  paths: of the server."""

    methods: str
    paths: str


class OutputWay(msgspec.Struct, frozen=True):
    """A way to answer a request.

    whole: it needs every token of the prompt computed.  width: numbers for each token; 0 for one result of a prompt."""

    whole: bool = False
    width: int = 0


def _generating() -> dict[str, Calls]:
    paths = "/v1/completions, /v1/chat/completions, /v1/responses, /generate"
    return {"generate": Calls("generate, chat, stream", paths)}


class ModelUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one model.

    title: the kind in words, with an article.  tasks: each task that the model supports, with its calls.
    ways: the allowed values of ``SamplingParams.pooling``; '' generates text.
    max_len: longest prompt in tokens; 0 for the model's.  pad_token_id: not counted at the end of a prompt.
    sees: it reads pictures in conversations.
    own: what features know of the model, by their names, as each encodes its own.
    """

    kind: Kind = "generate"
    title: str = "a generating model"
    tasks: dict[str, Calls] = msgspec.field(default_factory=_generating)
    ways: dict[str, OutputWay] = msgspec.field(default_factory=lambda: {"": OutputWay()})
    max_len: int = 0
    pad_token_id: int | None = None
    sees: bool = False
    own: dict[str, bytes] = {}

    def __str__(self) -> str:
        return self.title

    def check(self, task: str, otherwise: str) -> None:
        """Raise RequestError (400) if the model does not support a task.  otherwise: the end of the error's text."""
        if task not in self.tasks:
            raise self._refusal(otherwise)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a request; a model without text samples one unused token.

        Raises RequestError for a way that the model does not have."""
        if params.pooling not in self.ways:
            way = params.pooling
            raise self._refusal(f"pooling={way[:100]!r} is for others" if way else "it generates no text")
        whole = self.ways[params.pooling].whole
        if self.kind != "generate":
            return PLAIN.replace(pooling=params.pooling, whole_prompt=whole)
        return params.replace(whole_prompt=whole) if params.whole_prompt != whole else params

    def shortest(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the first way of the model, for a request that only tests it."""
        return params.replace(pooling=next(iter(self.ways)))

    def _refusal(self, asked: str) -> RequestError:
        calls = ", ".join(f"LLM.{one.methods.replace(', ', ', LLM.')}" for one in self.tasks.values())
        paths = ", ".join(one.paths for one in self.tasks.values())
        message = f"this is {self}, and {asked}; what works is {paths} (in Python {calls})"
        return RequestError(message, code="unsupported_task", param="model")


GENERATING: Final = ModelUse()
