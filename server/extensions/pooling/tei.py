"""POST /embed: texts as vectors, as clients of Hugging Face's Text Embeddings Inference ask for them.

Owns: its body.  Does not know: how a model's output is pooled.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.features.pooling.requests import LONGEST
from server.extensions.pooling.embeddings import VectorEndpoint
from server.extensions.pooling.requests import MAX_INPUTS, Dimensions, PooledFields, PooledUsage, numbers
from server.generate.generation import Generation
from server.http.operation import generating
from server.openai.requests import Short


class TeiEmbedBody(PooledFields, frozen=True, kw_only=True):
    """Texts to embed.  truncate: a text that is too long loses its end.  prompt_name: of the checkpoint's prompts."""

    inputs: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    truncate: bool | None = None
    prompt_name: Short | None = None
    dimensions: Dimensions | None = None


class TeiEmbed(VectorEndpoint[TeiEmbedBody]):
    """POST /embed."""

    operation = generating(
        "/embed",
        "Texts as vectors, as Text Embeddings Inference has it.",
        answer=list[list[float]],
        body=TeiEmbedBody,
        span="embeddings",
    )
    body_type = TeiEmbedBody

    def translate(self, body: TeiEmbedBody) -> Generation:
        requests = self.translator.requests
        requests.check_dimensions(body.dimensions)
        if body.truncate and body.truncate_prompt_tokens is None:
            body = msgspec.structs.replace(body, truncate_prompt_tokens=LONGEST)
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        return self.translator.generation(body, requests.prompts(inputs, body.prompt_name), requests.params(), "inputs")

    def rename(self, field: str, body: TeiEmbedBody) -> str:
        return "inputs" if field == "prompt" else field

    def answer(self, name: str, body: TeiEmbedBody, outputs: list[bytes], usage: PooledUsage) -> list[list[float]]:
        requests = self.translator.requests
        vectors = (requests.result(one, dimensions=body.dimensions, activated=body.activated) for one in outputs)
        return [numbers(vector) for vector in vectors]
