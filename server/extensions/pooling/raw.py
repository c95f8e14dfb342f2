"""POST /pooling: whatever a model gives that is no text, as vLLM has it.

Owns: its bodies.  Does not know: what the numbers mean.
"""

import base64
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from engine.features.pooling.requests import PooledRequests
from engine.types.errors import FieldError
from server.extensions.pooling.embeddings import EmbeddingBody, encoded
from server.extensions.pooling.requests import PooledEndpoint, PooledUsage
from server.generate.generation import Generation
from server.http.operation import generating

Encoded = list[float | list[float]] | str


class PoolingBody(EmbeddingBody, frozen=True, kw_only=True):
    """Texts to pool.

    task: 'embed' or 'classify', where it is the model's, or 'token_embed' for a vector of each token."""

    task: str | None = None


class PoolingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One output.  data: numbers, or a list of numbers for each token, or all of them as float32 in base64."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: Encoded


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

    operation = generating("/pooling", "Whatever a model gives that is no text.", answer=PoolingList, body=PoolingBody)
    body_type = PoolingBody
    task: ClassVar[str] = "pool"
    refusal: ClassVar[str] = "it pools nothing"
    id_prefix = "pool-"

    def translate(self, body: PoolingBody) -> Generation:
        requests = self.translator.requests
        own, *others = tasks = requests.tasks
        if body.task not in (None, *tasks):
            raise FieldError("task", f"this model has {' and '.join(map(repr, tasks))}", code="unsupported_parameter")
        method = body.task if body.task in others else body.pooling
        if method is not body.pooling is not None:
            raise FieldError("pooling", f"the task {body.task!r} pools nothing", code="unsupported_parameter")
        if own == "classify":
            for name in ("dimensions", "prompt_name"):
                if getattr(body, name) is not None:
                    raise FieldError(name, "this model gives no embeddings", code="unsupported_parameter")
        requests.check_dimensions(body.dimensions)
        return self.translator.inputs(body, method=method, prompt_name=body.prompt_name)

    def answer(self, name: str, body: PoolingBody, outputs: list[bytes], usage: PooledUsage) -> PoolingList:
        results = _encoded(self.translator.requests, body, outputs)
        data = [PoolingEntry(index=index, data=one) for index, one in enumerate(results)]
        model = self.translator.card.name
        return PoolingList(id=name, created=int(time.time()), model=model, data=data, usage=usage)


def _encoded(requests: PooledRequests, body: PoolingBody, outputs: list[bytes]) -> Sequence[Encoded]:
    """Return each output's numbers, as JSON has them."""
    if body.task in (None, requests.tasks[0]):
        return encoded(requests, body, outputs)  # type: ignore[return-value]  # mypy: lists are invariant
    wanted: dict[str, Any] = {"dimensions": body.dimensions, "activated": body.activated, "task": body.task}
    rows = (requests.result(one, **wanted) for one in outputs)
    if body.encoding_format == "base64":
        return [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in rows]
    return [one.tolist() for one in rows]
