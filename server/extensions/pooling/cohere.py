"""POST /v2/embed: texts as vectors, as Cohere's clients ask for them.

Owns: its bodies.  Does not know: how a model's output is pooled.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from engine.features.pooling.requests import LONGEST
from engine.types.errors import FieldError
from server.extensions.pooling.embeddings import EmbeddingBody, VectorEndpoint, encoded
from server.extensions.pooling.requests import MAX_INPUTS, Dimensions, PooledFields, PooledUsage
from server.generate.generation import Generation
from server.http.operation import generating
from server.openai.requests import Short

# Kinds of input -> what checkpoints call the prompts before them.
PROMPTS: Final = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class CohereEmbedBody(PooledFields, frozen=True, kw_only=True):
    """Texts to embed.  input_type: picks the checkpoint's prompt of that name, if it has one.

    truncate: whether a text that is too long loses its end, or is refused."""

    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    input_type: Short | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "END"] | None = None


class CohereVectors(msgspec.Struct, frozen=True, rename={"floats": "float"}, omit_defaults=True):
    """A vector for each text, in each form that was asked for: numbers, or float32 in base64."""

    floats: list[list[float]] = []
    base64: list[str] = []


class ApiVersion(msgspec.Struct, frozen=True):
    """The version of Cohere's API that the answer follows."""

    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    """The tokens that were read."""

    input_tokens: int


class CohereMeta(msgspec.Struct, frozen=True):
    """Facts about an answer."""

    billed_units: BilledUnits
    api_version: ApiVersion = ApiVersion()


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the texts."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta


class CohereEmbed(VectorEndpoint[CohereEmbedBody]):
    """POST /v2/embed."""

    operation = generating(
        "/v2/embed",
        "Texts as vectors, as Cohere has it.",
        answer=CohereEmbeddings,
        body=CohereEmbedBody,
        span="embeddings",
    )
    body_type = CohereEmbedBody
    id_prefix = "embed-"

    def translate(self, body: CohereEmbedBody) -> Generation:
        if body.input_type is not None and body.input_type not in PROMPTS:
            known = ", ".join(f"'{one}'" for one in PROMPTS)
            raise FieldError("input_type", f"'{body.input_type[:40]}' is not known; it must be one of {known}")
        requests = self.translator.requests
        requests.check_dimensions(body.output_dimension)
        names = PROMPTS.get(body.input_type or "", ())
        name = next((one for one in names if one in requests.pooling.prompts), None)
        if body.truncate_prompt_tokens is None and body.truncate != "NONE":
            body = msgspec.structs.replace(body, truncate_prompt_tokens=LONGEST)
        return self.translator.generation(body, requests.prompts(body.texts, name), requests.params(), "texts")

    def rename(self, field: str, body: CohereEmbedBody) -> str:
        return {"prompt": "texts", "dimensions": "output_dimension"}.get(field, field)

    def answer(self, name: str, body: CohereEmbedBody, outputs: list[bytes], usage: PooledUsage) -> CohereEmbeddings:
        def vectors(form: Literal["float", "base64"]) -> list[list[float] | str]:
            asked = EmbeddingBody(encoding_format=form, dimensions=body.output_dimension, use_activation=body.activated)
            return encoded(self.translator.requests, asked, outputs) if form in forms else []

        forms = body.embedding_types or ["float"]
        floats = [one for one in vectors("float") if isinstance(one, list)]
        texts = [one for one in vectors("base64") if isinstance(one, str)]
        return CohereEmbeddings(
            id=name,
            embeddings=CohereVectors(floats, texts),
            texts=body.texts,
            meta=CohereMeta(BilledUnits(usage.prompt_tokens)),
        )
