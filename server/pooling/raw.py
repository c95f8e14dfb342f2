"""POST /pooling: whatever a model gives that is no text, as vLLM has it.

Owns: its bodies.  Does not know: what the numbers mean.
"""

import time
import uuid
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from engine.checkpoints.pooling import Task
from engine.errors import FieldError
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.pooling.embeddings import EmbeddingBody, encoded
from server.pooling.requests import PooledTranslator, PooledUsage, pooled


class PoolingBody(EmbeddingBody, frozen=True, kw_only=True):
    """task: 'embed' or 'classify', where it is the model's; vLLM has others, for each token of a prompt."""

    task: str | None = None


class PoolingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """data: numbers, or float32 in base64."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingList(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingEntry]
    usage: PooledUsage


class RawPooling(Endpoint[PoolingBody]):
    """POST /pooling."""

    body_type = PoolingBody
    task: ClassVar[Task] = "pool"

    def __init__(self, translator: PooledTranslator) -> None:
        self._translator = translator

    def translate(self, body: PoolingBody) -> Generation:
        requests = self._translator.requests
        own = "classify" if requests.pooling.kind == "classify" else "embed"
        if body.task not in (None, own):
            raise FieldError("task", f"this model's is {own!r}", code="unsupported_parameter")
        if own == "classify":
            for name in ("dimensions", "prompt_name"):
                if getattr(body, name) is not None:
                    raise FieldError(name, "this model gives no embeddings", code="unsupported_parameter")
        requests.check_dimensions(body.dimensions)
        return self._translator.inputs(body, method=body.pooling, prompt_name=body.prompt_name)

    def rename(self, field: str, body: PoolingBody) -> str:
        return "input" if field == "prompt" else field

    def writer(self, body: PoolingBody, generation: Generation, usage: UsageCounter) -> "PoolingWriter":
        return PoolingWriter(body, usage, self._translator)


class PoolingWriter(Writer):
    """Writes a list of vectors, or of probabilities."""

    def __init__(self, body: PoolingBody, usage: UsageCounter, translator: PooledTranslator) -> None:
        self.id = f"pool-{uuid.uuid4().hex}"
        self._body = body
        self._usage = usage
        self._translator = translator

    def whole(self, outputs: Sequence[Output]) -> PoolingList:
        body, result = self._body, self._translator.requests.result
        activated = body.use_activation is not False
        results = [result(one, dimensions=body.dimensions, activated=activated) for one in pooled(outputs)]
        return PoolingList(
            id=self.id,
            created=int(time.time()),
            model=self._translator.card.name,
            data=[
                PoolingEntry(index=index, data=encoded(one, body.encoding_format)) for index, one in enumerate(results)
            ],
            usage=PooledUsage.of(self._usage),
        )
