"""POST /predict: texts as labels with their probabilities, as clients of Text Embeddings Inference ask for them.

Owns: its body and its answer.  Does not know: how probabilities come about.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from engine.features.pooling.requests import LONGEST, PooledRequests
from server.extensions.pooling.requests import MAX_INPUTS, PooledEndpoint, PooledFields, PooledUsage, numbers
from server.generate.generation import Generation
from server.http.operation import generating

Pair = Annotated[list[str], Meta(min_length=1, max_length=2)]  # one text, or two that are read together


class PredictBody(PooledFields, frozen=True, kw_only=True):
    """A text, a list of one or two texts that are read together, or a list of such lists.

    raw_scores: scores before the last function.  truncate: a text that is too long loses its end."""

    inputs: str | Annotated[list[str | Pair], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: bool | None = None
    truncate: bool | None = None


class Prediction(msgspec.Struct, frozen=True):
    """One label."""

    score: float
    label: str


class TeiPredict(PooledEndpoint[PredictBody]):
    """POST /predict."""

    operation = generating(
        "/predict",
        "Texts as labels, as Text Embeddings Inference has it.",
        answer=list[Prediction | list[Prediction]],
        body=PredictBody,
    )
    body_type = PredictBody
    task: ClassVar[str] = "classify"
    refusal: ClassVar[str] = "it has no labels"

    def translate(self, body: PredictBody) -> Generation:
        requests = self.translator.requests
        if body.truncate and body.truncate_prompt_tokens is None:
            body = msgspec.structs.replace(body, truncate_prompt_tokens=LONGEST)
        prompts = [
            prompt
            for first, *second in _batch(body)
            for prompt in (requests.pairs([first], second) if second else requests.prompts([first]))
        ]
        return self.translator.generation(body, prompts, requests.params(), "inputs")

    def rename(self, field: str, body: PredictBody) -> str:
        return "inputs" if field in ("prompt", "messages") else field

    def answer(
        self, name: str, body: PredictBody, outputs: list[bytes], usage: PooledUsage
    ) -> list[Prediction] | list[list[Prediction]]:
        requests = self.translator.requests
        activated = body.activated and not body.raw_scores
        found = [predictions(requests, one, activated=activated) for one in outputs]
        return found if _is_batch(body) else found[0]


def predictions(requests: PooledRequests, output: bytes, *, activated: bool) -> list[Prediction]:
    """Returns the labels of one output with their scores, the likeliest first."""
    scores = numbers(requests.result(output, activated=activated))
    named = [Prediction(*both) for both in zip(scores, requests.pooling.labels, strict=True)]
    return sorted(named, key=lambda entry: -entry.score)


def _is_batch(body: PredictBody) -> bool:
    """Whether the answer is a list for each entry."""
    return isinstance(body.inputs, list) and not _is_pair(body.inputs)


def _is_pair(inputs: list[str | Pair]) -> bool:
    """Whether a list of texts is one or two that are read together; of more, each is one of its own."""
    return len(inputs) <= 2 and all(isinstance(one, str) for one in inputs)


def _batch(body: PredictBody) -> list[list[str]]:
    """Return the texts that are read together, for each output."""
    if isinstance(body.inputs, str):
        return [[body.inputs]]
    if _is_pair(body.inputs):
        return [[one for one in body.inputs if isinstance(one, str)]]
    return [[one] if isinstance(one, str) else one for one in body.inputs]
