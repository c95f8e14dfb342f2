"""POST /v1/embeddings: texts as vectors of length 1.

Owns: its bodies and its flow.  Does not know: how a model's output is pooled.
The vector is the last layer's output of the last token, or the mean over all tokens where ``pooling`` says so.
"""

import base64
from typing import Annotated, Literal

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta

from engine.config import LimitsSection, ServerSection
from engine.errors import RequestError
from engine.messages import Finish
from engine.params import SamplingParams
from server.admission import refuse_early
from server.backend import Ingress
from server.body import BodyReader
from server.choices import Choices
from server.completions import read_prompts
from server.exchange import EXCHANGE
from server.generation import Generation, Translator
from server.model_card import ModelCard
from server.openai_requests import Priority, Salt, TokenId
from server.output import Output
from server.reply import json_reply
from server.usage import Tally

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


class EmbeddingRoute:
    """Its handler."""

    def __init__(
        self,
        translator: Translator,
        *,
        server: ServerSection,
        limits: LimitsSection,
        ingress: Ingress,
        card: ModelCard,
    ) -> None:
        self._translator = translator
        self._reader = BodyReader(EmbeddingBody, self._translate, server)
        self._limits = limits
        self._ingress = ingress
        self._card = card

    def _translate(self, body: EmbeddingBody) -> tuple[EmbeddingBody, Generation]:
        self._translator.check_model(body.model)
        prompts = read_prompts(body.input, "input")
        self._translator.check_count(len(prompts), 1, "input")
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=body.pooling or "last")
        return body, Generation(
            prompts=prompts,
            params=params,
            num_choices=1,
            echo=False,
            stream=False,
            include_usage=False,
            continuous_usage=False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            prompt_only=True,
        )

    async def post(self, request: web.Request) -> web.StreamResponse:
        """aiohttp's handler.  Raises RequestError or EngineDied."""
        refuse_early(self._ingress, self._limits)
        body, generation = await self._reader.read(request)
        tally = Tally(generation)
        try:
            async with Choices(self._ingress, generation) as choices:
                outputs = [Output(index) for index in range(choices.num_choices)]
                while (item := await choices.next()) is not None:
                    index, delta = item
                    tally.add(index, delta)
                    outputs[index].add(delta)
                    if delta.finish == Finish.ABORT:
                        raise RequestError("the request was aborted", status=409, code="aborted")
        except RequestError as error:
            if error.param == "prompt":
                error.param = "input"
            raise
        finally:
            request[EXCHANGE].usage = usage = tally.total()
        entries = [EmbeddingEntry(index=one.index, embedding=_encoded(one.delta.embedding, body)) for one in outputs]
        counts = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        return json_reply(EmbeddingList(data=entries, model=self._card.name, usage=counts))


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
