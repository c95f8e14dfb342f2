"""POST /api/embed and /api/embeddings: texts as vectors, as Ollama has them.

Owns: their bodies.  Does not know: how a model's output is pooled.
"""

from typing import ClassVar

from engine.features.pooling.requests import LONGEST
from server.extensions.ollama.names import served_name
from server.extensions.ollama.objects import EmbedAnswer, OldEmbedAnswer, OllamaError
from server.extensions.ollama.requests import KeepAlive, OllamaOptions
from server.extensions.pooling.embeddings import VectorEndpoint
from server.extensions.pooling.requests import (
    Dimensions,
    F,
    InputFields,
    Inputs,
    PooledFields,
    PooledUsage,
    numbers,
)
from server.generate.generation import Generation
from server.http.operation import Operation, generating
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


class _Vectors(VectorEndpoint[F]):
    """An endpoint for vectors of the model that Ollama's clients name."""

    def __init__(self, translator: Translator) -> None:
        super().__init__(translator)
        self._names = translator

    def inputs(self, model: str, texts: str | Inputs, longest: int | None = LONGEST) -> Generation:
        """Returns what texts ask.  longest: tokens to which they are cut; None for a refusal of longer ones."""
        name = served_name(model, self._names)
        return self.translator.inputs(InputFields(model=name, input=texts, truncate_prompt_tokens=longest))


class OllamaEmbed(_Vectors[OllamaEmbedBody]):
    """POST /api/embed."""

    operation: ClassVar[Operation] = generating(
        "/api/embed",
        "Texts as vectors, as Ollama has them.",
        answer=EmbedAnswer,
        body=OllamaEmbedBody,
        error=OllamaError,
        span="embeddings",
    )
    body_type = OllamaEmbedBody

    def translate(self, body: OllamaEmbedBody) -> Generation:
        self.translator.requests.check_dimensions(body.dimensions)
        longest = None if body.truncate is False else LONGEST
        return self.inputs(body.model, body.input if isinstance(body.input, str) else [*body.input], longest)

    def answer(self, name: str, body: OllamaEmbedBody, outputs: list[bytes], usage: PooledUsage) -> EmbedAnswer:
        result = self.translator.requests.result
        vectors = [numbers(result(one, dimensions=body.dimensions, activated=True)) for one in outputs]
        return EmbedAnswer(model=body.model, embeddings=vectors, prompt_eval_count=usage.prompt_tokens)


class OldEmbeddings(_Vectors[OldEmbedBody]):
    """POST /api/embeddings."""

    operation: ClassVar[Operation] = generating(
        "/api/embeddings",
        "A text as a vector, as Ollama had it before.",
        answer=OldEmbedAnswer,
        body=OldEmbedBody,
        error=OllamaError,
        span="embeddings",
    )
    body_type = OldEmbedBody

    def translate(self, body: OldEmbedBody) -> Generation:
        return self.inputs(body.model, body.prompt)

    def rename(self, field: str, body: OldEmbedBody) -> str:
        return "prompt" if field == "input" else field

    def answer(self, name: str, body: OldEmbedBody, outputs: list[bytes], usage: PooledUsage) -> OldEmbedAnswer:
        (one,) = outputs
        return OldEmbedAnswer(embedding=numbers(self.translator.requests.result(one, dimensions=None, activated=True)))
