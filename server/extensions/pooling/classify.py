"""POST /classify: texts as probabilities of labels, as vLLM has it.

Owns: its bodies.  Does not know: labels, how they come about.
"""

import time
from typing import ClassVar, Literal

import msgspec

from engine.types.errors import FieldError
from server.extensions.pooling.requests import InputFields, PooledEndpoint, PooledUsage, numbers
from server.generate.generation import Generation
from server.http.operation import generating


class ClassifyBody(InputFields, frozen=True, kw_only=True):
    """Texts, or a conversation.  text: SGLang's name for the input."""

    text: str | list[str] | None = None


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """The classification of one input.  label: the likeliest one."""

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


class Classify(PooledEndpoint[ClassifyBody]):
    """POST /classify."""

    operation = generating(
        "/classify",
        "Texts as probabilities of labels.",
        also=("/v1/classify",),
        answer=ClassificationList,
        body=ClassifyBody,
    )
    body_type = ClassifyBody
    task: ClassVar[str] = "classify"
    refusal: ClassVar[str] = "it has no labels"
    id_prefix = "classify-"

    def translate(self, body: ClassifyBody) -> Generation:
        if body.text is not None and body.input is None:
            body = msgspec.structs.replace(body, input=body.text)
        elif body.text is not None:
            raise FieldError("text", "means the same as input; one of them is enough")
        return self.translator.inputs(body)

    def rename(self, field: str, body: ClassifyBody) -> str:
        name = super().rename(field, body)
        return "text" if name == "input" and body.text is not None else name

    def answer(self, name: str, body: ClassifyBody, outputs: list[bytes], usage: PooledUsage) -> object:
        requests = self.translator.requests
        data = []
        for index, one in enumerate(outputs):
            likely = requests.result(one, activated=body.activated)
            label = requests.label(likely)
            data.append(Classification(index=index, label=label, probs=numbers(likely), num_classes=len(likely)))
        model = self.translator.card.name
        return ClassificationList(id=name, created=int(time.time()), model=model, data=data, usage=usage)
