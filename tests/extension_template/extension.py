"""An endpoint that generates, as small as one can be: POST /v1/echo answers with the text and what follows it."""

from collections.abc import Sequence

import msgspec

from engine.messages import Delta
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.http.operation import generating
from server.openai.requests import GenerationBody
from server.openai.translator import Translator
from server.run.extension import Extension


class EchoBody(GenerationBody, frozen=True, kw_only=True):
    """A text."""

    text: str


class EchoAnswer(msgspec.Struct, frozen=True):
    """More text."""

    text: str


class Echo(Endpoint[EchoBody]):
    """POST /v1/echo."""

    operation = generating("/v1/echo", "Say it again.", answer=EchoAnswer, body=EchoBody, event=EchoAnswer)
    body_type = EchoBody

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: EchoBody) -> Generation:
        self._translator.check_model(body.model)
        return self._translator.translate(body, (body.text,), max_tokens=body.max_tokens, logprobs=None)

    def writer(self, body: EchoBody, generation: Generation, usage: UsageCounter) -> "EchoWriter":
        return EchoWriter(body.text)


class EchoWriter(Writer):
    """Writes the text and what follows it."""

    id = ""

    def __init__(self, text: str) -> None:
        self._text = text

    def whole(self, outputs: Sequence[Output]) -> EchoAnswer:
        return EchoAnswer(self._text + outputs[0].delta.text)

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        text, self._text = self._text + delta.text, ""
        return [EchoAnswer(text)]


class EchoExtension(Extension):
    """The endpoint as a part of the server."""

    endpoints = (Echo,)


EXTENSION = EchoExtension()
