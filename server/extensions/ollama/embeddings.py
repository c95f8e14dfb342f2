"""POST /api/embed and /api/embeddings: texts as vectors, as Ollama has them.

Owns: their bodies.  Does not know: how a model's output is pooled.
"""

from typing import ClassVar

from engine.features.pooling.requests import LONGEST
from server.extensions.ollama.names import served_name
from server.extensions.ollama.objects import EmbedAnswer, OldEmbedAnswer, OllamaError
from server.extensions.ollama.requests import KeepAlive, OllamaOptions
from server.extensions.pooling.requests import (
    Dimensions,
    InputFields,
    PooledEndpoint,
    PooledFields,
    PooledUsage,
    numbers,
)
from server.generate.generation import Generation
from server.http.operation import Operation
from server.openai.translator import Translator


class OllamaEmbedBody(PooledFields, frozen=True, kw_only=True):
    """POST /api/embed.  truncate: a longer input loses its end, unless this is false."""

    model: str
    input: str | list[str]
    truncate: bool | None = True
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OldEmbedBody(PooledFields, frozen=True, kw_only=True):
    """POST /api/embeddings, the older way: one text."""

    model: str
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbed(PooledEndpoint[OllamaEmbedBody]):
    """POST /api/embed."""

    operation: ClassVar[Operation] = Operation(
        "POST",
        "/api/embed",
        "client",
        "Texts as vectors, as Ollama has them.",
        answer=EmbedAnswer,
        body=OllamaEmbedBody,
        error=OllamaError,
        generates=True,
        span="embeddings",
    )
    body_type = OllamaEmbedBody
    task: ClassVar[str] = "embed"
    refusal: ClassVar[str] = "it gives no embeddings"

    def __init__(self, translator: Translator) -> None:
        super().__init__(translator)
        self._names = translator

    def translate(self, body: OllamaEmbedBody) -> Generation:
        self.translator.requests.check_dimensions(body.dimensions)
        longest = None if body.truncate is False else LONGEST
        name = served_name(body.model, self._names)
        texts: str | list[str | int | list[int]] = body.input if isinstance(body.input, str) else [*body.input]
        return self.translator.inputs(InputFields(model=name, input=texts, truncate_prompt_tokens=longest))

    def answer(self, name: str, body: OllamaEmbedBody, outputs: list[bytes], usage: PooledUsage) -> EmbedAnswer:
        result = self.translator.requests.result
        vectors = [numbers(result(one, dimensions=body.dimensions, activated=True)) for one in outputs]
        return EmbedAnswer(model=body.model, embeddings=vectors, prompt_eval_count=usage.prompt_tokens)


class OldEmbeddings(PooledEndpoint[OldEmbedBody]):
    """POST /api/embeddings."""

    operation: ClassVar[Operation] = Operation(
        "POST",
        "/api/embeddings",
        "client",
        "A text as a vector, as Ollama had it before.",
        answer=OldEmbedAnswer,
        body=OldEmbedBody,
        error=OllamaError,
        generates=True,
        span="embeddings",
    )
    body_type = OldEmbedBody
    task: ClassVar[str] = "embed"
    refusal: ClassVar[str] = "it gives no embeddings"

    def __init__(self, translator: Translator) -> None:
        super().__init__(translator)
        self._names = translator

    def translate(self, body: OldEmbedBody) -> Generation:
        name = served_name(body.model, self._names)
        return self.translator.inputs(InputFields(model=name, input=body.prompt, truncate_prompt_tokens=LONGEST))

    def rename(self, field: str, body: OldEmbedBody) -> str:
        return "prompt" if field == "input" else field

    def answer(self, name: str, body: OldEmbedBody, outputs: list[bytes], usage: PooledUsage) -> OldEmbedAnswer:
        (one,) = outputs
        return OldEmbedAnswer(embedding=numbers(self.translator.requests.result(one, dimensions=None, activated=True)))
