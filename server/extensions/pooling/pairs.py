"""POST /v1/score and /v1/rerank: how well texts fit another, as vLLM has it and as Jina and Cohere have it.

Owns: their bodies, and which documents an answer shows.  Does not know: how a model compares two texts.
"""

import time
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.features.pooling.requests import LONGEST, PooledRequests
from engine.types.errors import FieldError
from server.extensions.pooling.requests import PooledEndpoint, PooledFields, PooledUsage
from server.generate.generation import Generation
from server.http.operation import generating
from server.openai.requests import TokenId

# What vLLM calls the two sides; the first two names are those of errors.
NAMES = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("query", "items")
)  # fmt: skip
Texts = str | list[str]
TokenIds = list[TokenId]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class ScoreBody(PooledFields, frozen=True, kw_only=True):
    """One text or as many as there are to compare; the pairs of names mean the same.

    label_token_ids: of models that generate, the tokens that may come after a query and an item.  Then scores are
    their probabilities; with apply_softmax among themselves.  item_first: the item goes before the query."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    query: str | TokenIds | None = None
    items: str | list[str | TokenIds] | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    label_token_ids: TokenIds | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class Document(msgspec.Struct, frozen=True):
    """A document's text."""

    text: str


class RerankBody(PooledFields, frozen=True, kw_only=True):
    """Documents to rank.

    texts: the documents of clients of Text Embeddings Inference, which get a list of ``RankedText``.
    raw_scores, return_text, truncate: theirs too; scores before the last function, texts in the answer, and a pair
    that is too long loses its end.
    top_n, or Voyage's name top_k: how many of the best are answered; all if it is left out or 0."""

    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    top_n: Count | None = None
    top_k: Count | None = None
    return_documents: bool | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of the pair with that number."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One entry per pair, in order."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class LabelScores(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="scoring"):
    """The scores of the labels for each item, in their order."""

    scores: list[list[float]]
    model: str
    usage: PooledUsage


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A ranked document.  index: of the document in the request."""

    index: int
    document: Document | UnsetType = UNSET
    relevance_score: float


class RankedText(msgspec.Struct, frozen=True, kw_only=True):
    """A ranked text.  index: of the text in the request."""

    index: int
    text: str | UnsetType = UNSET
    score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]


class ScorePairs(PooledEndpoint[ScoreBody]):
    """POST /v1/score."""

    operation = generating(
        "/v1/score", "How well texts fit another.", also=("/score",), answer=ScoreList | LabelScores, body=ScoreBody
    )
    body_type = ScoreBody
    task: ClassVar[str] = "score"
    refusal: ClassVar[str] = "it scores no pairs of texts"
    id_prefix = "score-"

    def translate(self, body: ScoreBody) -> Generation:
        for name in ("label_token_ids", "apply_softmax", "item_first"):
            if getattr(body, name):
                raise FieldError(name, f"only for models that generate, and this is {self.translator.card.use}")
        requests = self.translator.requests
        return self.translator.generation(body, requests.pairs(*_sides(body)), requests.params(), _names(body)[1])

    def rename(self, field: str, body: ScoreBody) -> str:
        return _names(body)[1] if field in ("prompt", "messages", "text_2") else field

    def answer(self, name: str, body: ScoreBody, outputs: list[bytes], usage: PooledUsage) -> ScoreList:
        queries, _ = _sides(body)
        scores = _scores(self.translator.requests, body, outputs, len(queries))
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        model = self.translator.card.name
        return ScoreList(id=name, created=int(time.time()), model=model, data=data, usage=usage)


class Rerank(PooledEndpoint[RerankBody]):
    """POST /v1/rerank."""

    operation = generating(
        "/v1/rerank",
        "Documents in the order in which they fit a query.",
        also=("/rerank", "/v2/rerank"),
        answer=Ranking,
        body=RerankBody,
    )
    body_type = RerankBody
    task: ClassVar[str] = "score"
    refusal: ClassVar[str] = "it scores no pairs of texts"
    id_prefix = "rerank-"

    def translate(self, body: RerankBody) -> Generation:
        if (body.documents is None) == (body.texts is None):
            raise FieldError("documents", "exactly one of documents and texts is needed")
        if not (documents := _documents(body)):
            raise FieldError(self.rename("prompt", body), "an empty list; expected at least one")
        if body.truncate and body.truncate_prompt_tokens is None:
            body = msgspec.structs.replace(body, truncate_prompt_tokens=LONGEST)
        requests = self.translator.requests
        prompts = requests.pairs([body.query], documents)
        return self.translator.generation(body, prompts, requests.params(), self.rename("prompt", body))

    def rename(self, field: str, body: RerankBody) -> str:
        if field not in ("prompt", "messages"):
            return field
        return "documents" if body.texts is None else "texts"

    def answer(self, name: str, body: RerankBody, outputs: list[bytes], usage: PooledUsage) -> object:
        ranked = self.ranked(body, outputs)
        if body.texts is not None:
            shown = bool(body.return_text)
            return [
                RankedText(index=index, text=text if shown else UNSET, score=score) for index, text, score in ranked
            ]
        results = [
            Ranked(
                index=index,
                document=Document(text) if body.return_documents is not False else UNSET,
                relevance_score=score,
            )
            for index, text, score in ranked
        ]
        return Ranking(id=name, model=self.translator.card.name, usage=usage, results=results)

    def ranked(self, body: RerankBody, outputs: list[bytes]) -> list[tuple[int, str, float]]:
        """Returns (number, document, score), the best first."""
        if body.raw_scores:
            body = msgspec.structs.replace(body, use_activation=False)
        scores, documents = _scores(self.translator.requests, body, outputs, 1), _documents(body)
        most = body.top_k if body.top_n is None else body.top_n
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: most or None]
        return [(index, documents[index], scores[index]) for index in order]


def _scores(
    requests: PooledRequests, body: ScoreBody | RerankBody, outputs: list[bytes], num_queries: int
) -> list[float]:
    raw = [requests.result(one, activated=False) for one in outputs]
    return requests.scores(raw, num_queries, activated=body.activated)


def _names(body: ScoreBody) -> tuple[str, str]:
    """The two fields that the body has."""
    given = [pair for pair in NAMES if all(getattr(body, name) is not None for name in pair)]
    if given:
        return given[0]
    found = [pair for pair in NAMES if any(getattr(body, name) is not None for name in pair)]
    if not found:
        raise FieldError(NAMES[0][0], f"required together with {NAMES[0][1]}, but not given")
    name, other = sorted(found[0], key=lambda name: getattr(body, name) is None)
    raise FieldError(name, f"{other} is needed beside it, but not given")


def _sides(body: ScoreBody) -> tuple[list[str], list[str]]:
    names = _names(body)
    first, second = ([one] if isinstance(one := getattr(body, name), str) else one for name in names)
    for name, texts in zip(names, (first, second), strict=True):
        if not all(isinstance(one, str) for one in texts):
            raise FieldError(name, "token ids; expected texts")
    return first, second


def _documents(body: RerankBody) -> list[str]:
    if body.texts is not None:
        return body.texts
    return [one if isinstance(one, str) else one.text for one in body.documents or ()]
