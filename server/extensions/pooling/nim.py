"""POST /v1/ranking: passages in the order in which they fit a query, as clients of NVIDIA's NIM ask for them.

Owns: its body and its answer.  Does not know: how a model compares two texts.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from engine.features.pooling.requests import LONGEST
from server.extensions.pooling.pairs import Document
from server.extensions.pooling.requests import MAX_INPUTS, PooledEndpoint, PooledFields, PooledUsage
from server.generate.generation import Generation
from server.http.operation import generating


class RankingBody(PooledFields, frozen=True, kw_only=True):
    """Passages to rank.  truncate: 'END' for a pair that is too long to lose its end."""

    query: Document
    passages: Annotated[list[Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    truncate: Literal["NONE", "END"] = "NONE"


class RankedPassage(msgspec.Struct, frozen=True, kw_only=True):
    """A ranked passage.  index: of the passage in the request.  logit: the score before the last function."""

    index: int
    logit: float


class Rankings(msgspec.Struct, frozen=True, kw_only=True):
    """The best first."""

    rankings: list[RankedPassage]
    usage: PooledUsage


class NimRanking(PooledEndpoint[RankingBody]):
    """POST /v1/ranking."""

    operation = generating(
        "/v1/ranking", "Passages in the order in which they fit a query.", answer=Rankings, body=RankingBody
    )
    body_type = RankingBody
    task: ClassVar[str] = "score"
    refusal: ClassVar[str] = "it scores no pairs of texts"

    def translate(self, body: RankingBody) -> Generation:
        requests = self.translator.requests
        if body.truncate == "END" and body.truncate_prompt_tokens is None:
            body = msgspec.structs.replace(body, truncate_prompt_tokens=LONGEST)
        prompts = requests.pairs([body.query.text], [one.text for one in body.passages])
        return self.translator.generation(body, prompts, requests.params(), "passages")

    def rename(self, field: str, body: RankingBody) -> str:
        return "passages" if field in ("prompt", "messages") else field

    def answer(self, name: str, body: RankingBody, outputs: list[bytes], usage: PooledUsage) -> Rankings:
        requests = self.translator.requests
        logits = requests.scores([requests.result(one, activated=False) for one in outputs], 1, activated=False)
        order = sorted(range(len(logits)), key=lambda index: -logits[index])
        return Rankings(rankings=[RankedPassage(index=index, logit=logits[index]) for index in order], usage=usage)
