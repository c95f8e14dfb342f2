"""POST /infinity/embeddings, /infinity/rerank and /infinity/classify: the dialect of Infinity's clients.

Owns: its bodies and answers where they differ from those of other clients.
Does not know: how texts become vectors, scores or labels.
No body says which dialect it is in, so these have paths of their own: a client's base URL ends in ``/infinity``.
"""

import time
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.types.errors import FieldError
from server.extensions.pooling.classify import Classify, ClassifyBody
from server.extensions.pooling.embeddings import EmbeddingBody, EmbeddingList, Embeddings
from server.extensions.pooling.pairs import Rerank, RerankBody
from server.extensions.pooling.predict import Prediction, predictions
from server.extensions.pooling.requests import PooledUsage
from server.generate.generation import Generation
from server.http.operation import generating

AnySize = Annotated[int, Meta(ge=0, le=1 << 20)]


class InfinityEmbeddingBody(EmbeddingBody, frozen=True, kw_only=True):
    """Texts to embed.  dimensions, which LiteLLM calls output_dimension: 0 for all.  modality: of the inputs."""

    dimensions: AnySize | None = None
    output_dimension: AnySize | None = None
    modality: Literal["text"] | None = None


class InfinityClassifyBody(ClassifyBody, frozen=True, kw_only=True):
    """Texts to classify.  raw_scores: scores before the last function."""

    raw_scores: bool | None = None


class InfinityRanked(msgspec.Struct, frozen=True, kw_only=True):
    """A ranked document.  index: of the document in the request.  document: its text."""

    index: int
    document: str | UnsetType = UNSET
    relevance_score: float


class InfinityRanking(msgspec.Struct, frozen=True, kw_only=True):
    """The best first."""

    id: str
    object: Literal["rerank"] = "rerank"
    created: int
    model: str
    results: list[InfinityRanked]
    usage: PooledUsage


class InfinityLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The labels of each input, the likeliest first."""

    id: str
    object: Literal["classify"] = "classify"
    created: int
    model: str
    data: list[list[Prediction]]
    usage: PooledUsage


class InfinityEmbeddings(Embeddings):
    """POST /infinity/embeddings."""

    operation = generating(
        "/infinity/embeddings",
        "Texts as vectors, as Infinity has it.",
        answer=EmbeddingList,
        body=InfinityEmbeddingBody,
        span="embeddings",
    )
    body_type = InfinityEmbeddingBody

    def translate(self, body: EmbeddingBody) -> Generation:
        return super().translate(_sized(body))

    def answer(self, name: str, body: EmbeddingBody, outputs: list[bytes], usage: PooledUsage) -> EmbeddingList:
        return super().answer(name, _sized(body), outputs, usage)


class InfinityRerank(Rerank):
    """POST /infinity/rerank."""

    operation = generating(
        "/infinity/rerank",
        "Documents in the order in which they fit a query, as Infinity has it.",
        answer=InfinityRanking,
        body=RerankBody,
    )

    def translate(self, body: RerankBody) -> Generation:
        if body.texts is not None:
            raise FieldError("texts", "called documents here")
        return super().translate(body)

    def answer(self, name: str, body: RerankBody, outputs: list[bytes], usage: PooledUsage) -> InfinityRanking:
        results = [
            InfinityRanked(index=index, document=text if body.return_documents else UNSET, relevance_score=score)
            for index, text, score in self.ranked(body, outputs)
        ]
        model = self.translator.card.name
        return InfinityRanking(id=name, created=int(time.time()), model=model, results=results, usage=usage)


class InfinityClassify(Classify):
    """POST /infinity/classify."""

    operation = generating(
        "/infinity/classify",
        "Texts as labels, as Infinity has it.",
        answer=InfinityLabels,
        body=InfinityClassifyBody,
    )
    body_type = InfinityClassifyBody

    def answer(self, name: str, body: ClassifyBody, outputs: list[bytes], usage: PooledUsage) -> InfinityLabels:
        raw = isinstance(body, InfinityClassifyBody) and body.raw_scores
        requests, activated = self.translator.requests, body.activated and not raw
        data = [predictions(requests, one, activated=activated) for one in outputs]
        model = self.translator.card.name
        return InfinityLabels(id=name, created=int(time.time()), model=model, data=data, usage=usage)


def _sized(body: EmbeddingBody) -> EmbeddingBody:
    """Returns a body whose dimensions are those that it asks for under either name."""
    other = body.output_dimension if isinstance(body, InfinityEmbeddingBody) else None
    return msgspec.structs.replace(body, dimensions=body.dimensions or other or None)
