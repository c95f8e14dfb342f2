"""POST /v1/embeddings: texts as vectors.

Owns: its bodies.  Does not know: how a model's output is pooled, which checkpoints say how.
"""

import base64
from typing import ClassVar, Literal

import msgspec

from engine.features.pooling.requests import PooledRequests
from server.extensions.pooling.requests import Dimensions, F, InputFields, PooledEndpoint, PooledUsage, numbers
from server.generate.generation import Generation
from server.http.operation import generating
from server.openai.requests import Short


class EmbeddingBody(InputFields, frozen=True, kw_only=True):
    """Texts to embed.  dimensions: only the first ones.  pooling: another way than the model's own.
    prompt_name: which of the checkpoint's prompts goes before each text."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Literal["last", "mean"] | None = None
    prompt_name: Short | None = None


class EmbeddingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One vector.  embedding: numbers, or float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per input, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: PooledUsage


class VectorEndpoint(PooledEndpoint[F]):
    """An endpoint whose answers have the vectors of texts."""

    task: ClassVar[str] = "embed"
    refusal: ClassVar[str] = "it gives no embeddings"


class Embeddings(VectorEndpoint[EmbeddingBody]):
    """POST /v1/embeddings."""

    operation = generating(
        "/v1/embeddings",
        "Texts as vectors.",
        answer=EmbeddingList,
        body=EmbeddingBody,
        in_batches=True,
        span="embeddings",
    )
    body_type = EmbeddingBody

    def translate(self, body: EmbeddingBody) -> Generation:
        self.translator.requests.check_dimensions(body.dimensions)
        return self.translator.inputs(body, method=body.pooling, prompt_name=body.prompt_name)

    def answer(self, name: str, body: EmbeddingBody, outputs: list[bytes], usage: PooledUsage) -> EmbeddingList:
        vectors = encoded(self.translator.requests, body, outputs)
        data = [EmbeddingEntry(index=index, embedding=vector) for index, vector in enumerate(vectors)]
        return EmbeddingList(data=data, model=self.translator.card.name, usage=usage)


def encoded(requests: PooledRequests, body: EmbeddingBody, outputs: list[bytes]) -> list[list[float] | str]:
    """Returns what was asked of each output, as JSON has it."""
    vectors = (requests.result(one, dimensions=body.dimensions, activated=body.activated) for one in outputs)
    if body.encoding_format == "base64":
        return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return [numbers(vector) for vector in vectors]
