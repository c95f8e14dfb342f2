"""POST /encode: texts as vectors, as SGLang's clients ask for them.

Owns: its body and its answer.  Does not know: how a model's output is pooled.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from server.extensions.pooling.embeddings import VectorEndpoint
from server.extensions.pooling.requests import MAX_INPUTS, Dimensions, PooledFields, PooledUsage, numbers
from server.generate.generation import Generation
from server.http.operation import generating


class EncodeBody(PooledFields, frozen=True, kw_only=True):
    """A text to embed, or a list of them."""

    text: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    dimensions: Dimensions | None = None


class EncodedText(msgspec.Struct, frozen=True):
    """The vector of one text."""

    embedding: list[float]


class SglangEncode(VectorEndpoint[EncodeBody]):
    """POST /encode."""

    operation = generating(
        "/encode",
        "Texts as vectors, as SGLang has it.",
        answer=EncodedText | list[EncodedText],
        body=EncodeBody,
        span="embeddings",
    )
    body_type = EncodeBody

    def translate(self, body: EncodeBody) -> Generation:
        requests = self.translator.requests
        requests.check_dimensions(body.dimensions)
        texts = [body.text] if isinstance(body.text, str) else body.text
        return self.translator.generation(body, requests.prompts(texts), requests.params(), "text")

    def rename(self, field: str, body: EncodeBody) -> str:
        return "text" if field == "prompt" else field

    def answer(
        self, name: str, body: EncodeBody, outputs: list[bytes], usage: PooledUsage
    ) -> EncodedText | list[EncodedText]:
        requests = self.translator.requests
        vectors = (requests.result(one, dimensions=body.dimensions, activated=body.activated) for one in outputs)
        found = [EncodedText(numbers(vector)) for vector in vectors]
        return found[0] if isinstance(body.text, str) else found
