"""POST /pooling: whatever a model gives that is no text, as vLLM has it.

Owns: its bodies.  Does not know: what the numbers mean.
"""

import time
from typing import ClassVar, Literal

import msgspec

from engine.types.errors import FieldError
from server.extensions.pooling.embeddings import EmbeddingBody, encoded
from server.extensions.pooling.requests import PooledEndpoint, PooledUsage
from server.generate.generation import Generation
from server.http.operation import Operation


class PoolingBody(EmbeddingBody, frozen=True, kw_only=True):
    """Texts to pool.

    task: 'embed' or 'classify', where it is the model's; vLLM has others, for each token of a prompt."""

    task: str | None = None


class PoolingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One output.  data: numbers, or float32 in base64."""

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


class RawPooling(PooledEndpoint[PoolingBody]):
    """POST /pooling."""

    operation = Operation(
        "POST",
        "/pooling",
        "client",
        "Whatever a model gives that is no text.",
        answer=PoolingList,
        body=PoolingBody,
        generates=True,
    )
    body_type = PoolingBody
    task: ClassVar[str] = "pool"
    refusal: ClassVar[str] = "it pools nothing"
    id_prefix = "pool-"

    def translate(self, body: PoolingBody) -> Generation:
        requests = self.translator.requests
        own = "classify" if requests.pooling.kind == "classify" else "embed"
        if body.task not in (None, own):
            raise FieldError("task", f"this model's is {own!r}", code="unsupported_parameter")
        if own == "classify":
            for name in ("dimensions", "prompt_name"):
                if getattr(body, name) is not None:
                    raise FieldError(name, "this model gives no embeddings", code="unsupported_parameter")
        requests.check_dimensions(body.dimensions)
        return self.translator.inputs(body, method=body.pooling, prompt_name=body.prompt_name)

    def answer(self, name: str, body: PoolingBody, outputs: list[bytes], usage: PooledUsage) -> PoolingList:
        results = encoded(self.translator.requests, body, outputs)
        data = [PoolingEntry(index=index, data=one) for index, one in enumerate(results)]
        model = self.translator.card.name
        return PoolingList(id=name, created=int(time.time()), model=model, data=data, usage=usage)
