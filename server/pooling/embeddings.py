"""POST /v1/embeddings: texts as vectors.

Owns: its bodies.  Does not know: how a model's output is pooled, which checkpoints say how.
"""

import base64
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from engine.checkpoints.pooling import Task
from engine.pooling import Float32
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.openai.requests import Short
from server.pooling.requests import Dimensions, InputFields, PooledTranslator, PooledUsage, numbers, pooled

EncodingFormat = Literal["float", "base64"]


class EmbeddingBody(InputFields, frozen=True, kw_only=True):
    """dimensions: only the first ones.  pooling: another way than the model's own.
    prompt_name: which of the checkpoint's prompts goes before each text.  use_activation: false for raw states."""

    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    pooling: Literal["last", "mean"] | None = None
    prompt_name: Short | None = None
    use_activation: bool | None = None


class EmbeddingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """embedding: numbers, or float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per input, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: PooledUsage


class Embeddings(Endpoint[EmbeddingBody]):
    """POST /v1/embeddings."""

    body_type = EmbeddingBody
    task: ClassVar[Task] = "embed"

    def __init__(self, translator: PooledTranslator) -> None:
        self._translator = translator

    def translate(self, body: EmbeddingBody) -> Generation:
        self._translator.requests.check_dimensions(body.dimensions)
        return self._translator.inputs(body, method=body.pooling, prompt_name=body.prompt_name)

    def rename(self, field: str, body: EmbeddingBody) -> str:
        return "input" if field == "prompt" else field

    def writer(self, body: EmbeddingBody, generation: Generation, usage: UsageCounter) -> "EmbeddingWriter":
        return EmbeddingWriter(body, usage, self._translator)


class EmbeddingWriter(Writer):
    """Writes a list of vectors."""

    id = ""

    def __init__(self, body: EmbeddingBody, usage: UsageCounter, translator: PooledTranslator) -> None:
        self._body = body
        self._usage = usage
        self._translator = translator

    def whole(self, outputs: Sequence[Output]) -> EmbeddingList:
        body, result = self._body, self._translator.requests.result
        activated = body.use_activation is not False
        vectors = [result(one, dimensions=body.dimensions, activated=activated) for one in pooled(outputs)]
        return EmbeddingList(
            data=[
                EmbeddingEntry(index=index, embedding=encoded(vector, body.encoding_format))
                for index, vector in enumerate(vectors)
            ],
            model=self._translator.card.name,
            usage=PooledUsage.of(self._usage),
        )


def encoded(vector: Float32, encoding_format: EncodingFormat | None) -> list[float] | str:
    """A vector as JSON has it."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return numbers(vector)
