"""POST /classify: texts as probabilities of labels, as vLLM has it.

Owns: its bodies.  Does not know: labels, how they come about.
"""

import time
import uuid
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from engine.checkpoints.pooling import Task
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.pooling.requests import InputFields, PooledTranslator, PooledUsage, numbers, pooled


class ClassifyBody(InputFields, frozen=True, kw_only=True):
    """use_activation: false for logits in the probabilities' place."""

    use_activation: bool | None = None


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """label: the likeliest one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PooledUsage


class Classify(Endpoint[ClassifyBody]):
    """POST /classify."""

    body_type = ClassifyBody
    task: ClassVar[Task] = "classify"

    def __init__(self, translator: PooledTranslator) -> None:
        self._translator = translator

    def translate(self, body: ClassifyBody) -> Generation:
        return self._translator.inputs(body)

    def rename(self, field: str, body: ClassifyBody) -> str:
        return "input" if field == "prompt" else field

    def writer(self, body: ClassifyBody, generation: Generation, usage: UsageCounter) -> "ClassifyWriter":
        return ClassifyWriter(body, usage, self._translator)


class ClassifyWriter(Writer):
    """Writes a list of classifications."""

    def __init__(self, body: ClassifyBody, usage: UsageCounter, translator: PooledTranslator) -> None:
        self.id = f"classify-{uuid.uuid4().hex}"
        self._body = body
        self._usage = usage
        self._translator = translator

    def whole(self, outputs: Sequence[Output]) -> ClassificationList:
        requests = self._translator.requests
        data = []
        for index, one in enumerate(pooled(outputs)):
            probabilities = requests.result(one, activated=self._body.use_activation is not False)
            data.append(
                Classification(
                    index=index,
                    label=requests.label(probabilities),
                    probs=numbers(probabilities),
                    num_classes=len(probabilities),
                )
            )
        return ClassificationList(
            id=self.id,
            created=int(time.time()),
            model=self._translator.card.name,
            data=data,
            usage=PooledUsage.of(self._usage),
        )
