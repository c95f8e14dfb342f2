"""POST /v1/score and /v1/rerank: how well texts fit another, as vLLM has it and as Jina and Cohere have it.

Owns: their bodies, and which documents an answer shows.  Does not know: how a model compares two texts.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.checkpoints.pooling import Task
from engine.errors import FieldError, RequestError
from engine.pooling import Float32
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.pooling.requests import PooledFields, PooledTranslator, PooledUsage, pooled

# What vLLM calls the two sides; the first two names are those of errors.
NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
Texts = str | list[str]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class ScoreBody(PooledFields, frozen=True, kw_only=True):
    """One text or as many as there are to compare; the pairs of names mean the same.
    use_activation: false for a reranker's logits."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool | None = None


class Document(msgspec.Struct, frozen=True):
    """A document's text."""

    text: str


class RerankBody(PooledFields, frozen=True, kw_only=True):
    """top_n: how many of the best are answered; all if it is left out or 0."""

    query: str
    documents: list[str | Document]
    top_n: Count | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pair with that number."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per pair, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """index: of the document in the request."""

    index: int
    document: Document | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]


class ScorePairs(Endpoint[ScoreBody]):
    """POST /v1/score."""

    body_type = ScoreBody
    task: ClassVar[Task] = "score"

    def __init__(self, translator: PooledTranslator) -> None:
        self._translator = translator

    def translate(self, body: ScoreBody) -> Generation:
        requests = self._translator.requests
        prompts = requests.pairs(*_sides(body))
        return self._translator.generation(body, prompts, requests.params(), _names(body)[1])

    def rename(self, field: str, body: ScoreBody) -> str:
        return _names(body)[1] if field in ("prompt", "messages", "text_2") else field

    def writer(self, body: ScoreBody, generation: Generation, usage: UsageCounter) -> "ScoreWriter":
        return ScoreWriter(body, usage, self._translator)


class ScoreWriter(Writer):
    """Writes a list of scores."""

    def __init__(self, body: ScoreBody, usage: UsageCounter, translator: PooledTranslator) -> None:
        self.id = f"score-{uuid.uuid4().hex}"
        self._body = body
        self._usage = usage
        self._translator = translator

    def whole(self, outputs: Sequence[Output]) -> ScoreList:
        queries, _ = _sides(self._body)
        scores = _scores(self._translator, outputs, len(queries), self._body.use_activation)
        return ScoreList(
            id=self.id,
            created=int(time.time()),
            model=self._translator.card.name,
            data=[Score(index=index, score=score) for index, score in enumerate(scores)],
            usage=PooledUsage.of(self._usage),
        )


class Rerank(Endpoint[RerankBody]):
    """POST /v1/rerank."""

    body_type = RerankBody
    task: ClassVar[Task] = "score"

    def __init__(self, translator: PooledTranslator) -> None:
        self._translator = translator

    def translate(self, body: RerankBody) -> Generation:
        if not body.documents:
            raise FieldError("documents", "an empty list; expected at least one")
        requests = self._translator.requests
        prompts = requests.pairs([body.query], [_text(one) for one in body.documents])
        return self._translator.generation(body, prompts, requests.params(), "documents")

    def rename(self, field: str, body: RerankBody) -> str:
        return "documents" if field in ("prompt", "messages") else field

    def writer(self, body: RerankBody, generation: Generation, usage: UsageCounter) -> "RerankWriter":
        return RerankWriter(body, usage, self._translator)


class RerankWriter(Writer):
    """Writes documents in the order of their scores."""

    def __init__(self, body: RerankBody, usage: UsageCounter, translator: PooledTranslator) -> None:
        self.id = f"rerank-{uuid.uuid4().hex}"
        self._body = body
        self._usage = usage
        self._translator = translator

    def whole(self, outputs: Sequence[Output]) -> Ranking:
        body = self._body
        scores = _scores(self._translator, outputs, 1, body.use_activation)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        shown = body.return_documents is not False
        results = [
            Ranked(
                index=index,
                document=Document(_text(body.documents[index])) if shown else UNSET,
                relevance_score=scores[index],
            )
            for index in best
        ]
        return Ranking(id=self.id, model=self._translator.card.name, usage=PooledUsage.of(self._usage), results=results)


def _scores(
    translator: PooledTranslator, outputs: Sequence[Output], num_queries: int, use_activation: bool | None
) -> list[float]:
    raw: list[Float32] = [translator.requests.result(one, activated=False) for one in pooled(outputs)]
    return translator.requests.scores(raw, num_queries, activated=use_activation is not False)


def _names(body: ScoreBody) -> tuple[str, str]:
    """The two fields that the body has."""
    given = [pair for pair in NAMES if all(getattr(body, name) is not None for name in pair)]
    if not given:
        raise RequestError("text_1: required together with text_2, but not given", param="text_1")
    return given[0]


def _sides(body: ScoreBody) -> tuple[list[str], list[str]]:
    first, second = (getattr(body, name) for name in _names(body))
    return ([first] if isinstance(first, str) else first), ([second] if isinstance(second, str) else second)


def _text(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text
