"""POST /v1/embeddings: texts as vectors of length 1.

Owns: its bodies.  Does not know: how a model's output is pooled.
The vector is the last layer's output of the last token, or the mean over all tokens where ``pooling`` says so.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from engine.errors import RequestError
from engine.messages import Finish, RequestOptions
from engine.params import SamplingParams
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.openai.completions import read_prompts
from server.openai.requests import Priority, Salt, TokenId
from server.openai.translator import Translator

Dimensions = Annotated[int, Meta(ge=1, le=1 << 20)]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """input: text, texts, token ids, or lists of token ids.  dimensions: only the first ones, at length 1 again."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Literal["last", "mean"] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


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
    usage: EmbeddingUsage


class Embeddings(Endpoint[EmbeddingBody]):
    """POST /v1/embeddings."""

    body_type = EmbeddingBody

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: EmbeddingBody) -> Generation:
        self._translator.check_model(body.model)
        prompts = read_prompts(body.input, "input")
        self._translator.check_count(len(prompts), 1, "input")
        return Generation(
            prompts=prompts,
            params=SamplingParams(max_tokens=1, temperature=0.0, pooling=body.pooling or "last"),
            options=RequestOptions(priority=body.priority or 0, cache_salt=body.cache_salt or "", prompt_only=True),
        )

    def rename(self, field: str, body: EmbeddingBody) -> str:
        return "input" if field == "prompt" else field

    def writer(self, body: EmbeddingBody, generation: Generation, usage: UsageCounter) -> "EmbeddingWriter":
        return EmbeddingWriter(body, usage, self._translator.card.name)


class EmbeddingWriter(Writer):
    """Writes a list of vectors."""

    id = ""

    def __init__(self, body: EmbeddingBody, usage: UsageCounter, model: str) -> None:
        self._body = body
        self._usage = usage
        self._model = model

    def whole(self, outputs: Sequence[Output]) -> EmbeddingList:
        if any(output.delta.finish == Finish.ABORT for output in outputs):
            raise RequestError("the request was aborted", status=409, code="aborted")
        num_tokens = self._usage.total().prompt_tokens
        data = [EmbeddingEntry(index=one.index, embedding=_encoded(one.delta.embedding, self._body)) for one in outputs]
        return EmbeddingList(data=data, model=self._model, usage=EmbeddingUsage(num_tokens, num_tokens))


def _encoded(embedding: bytes, body: EmbeddingBody) -> list[float] | str:
    vector = np.frombuffer(embedding, dtype=np.float32)
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise RequestError(f"dimensions={body.dimensions}: the model has {len(vector)}", param="dimensions")
        vector = vector[: body.dimensions]
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype(np.float32).tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
