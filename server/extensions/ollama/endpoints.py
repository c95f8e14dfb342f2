"""POST /api/chat and /api/generate: Ollama's API on top of what answers conversations.

Owns: what a body asks of the engine, by this API's names.  Does not know: lines of a stream, how text is made.
A request without a prompt loads a model there.  The model is loaded here, so such a request reads one token.
"""

from typing import ClassVar, TypeVar

import msgspec

from engine.types.errors import FieldError
from engine.types.prompt import ChatOptions, ChatTurn, Picture, Prompt
from server.extensions.ollama.conversation import no_images, read_images, read_messages
from server.extensions.ollama.names import served_name
from server.extensions.ollama.objects import ChatLine, GenerateLine, OllamaError
from server.extensions.ollama.requests import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from server.extensions.ollama.writer import ChatLines, GenerateLines
from server.generate.endpoint import Endpoint
from server.generate.generation import Generation
from server.generate.output import UsageCounter
from server.http.body import is_given
from server.http.operation import Operation, generating
from server.openai.conversation import NO_TOOLS, ToolRequest, read_tools, read_variables
from server.openai.requests import GenerationBody, JsonSchemaFormat, ResponseFormat, ToolBody
from server.openai.translator import Translator

B = TypeVar("B", bound=OllamaBody)
NO_OPTIONS = OllamaOptions()
# What templates call the switch for thoughts.
THINKING_VARIABLES = ("enable_thinking", "thinking")
OPTIONS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
SAME_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop", "seed")
# Samplers that this server does not have, and the values with which they do nothing.
OTHER_SAMPLERS: dict[str, tuple[float | None, ...]] = {
    "typical_p": (None, 0, 1),
    "tfs_z": (None, 0, 1),
    "mirostat": (None, 0),
}
LOADING_PROMPT = (0,)


class _TextEndpoint(Endpoint[B]):
    """The common part of both endpoints."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def rename(self, field: str, body: B) -> str:
        if field.startswith("response_format"):
            return "format"
        if field in OPTIONS or field in SAME_OPTIONS:
            return f"options.{OPTIONS.get(field, field)}"
        return field

    def _generation(self, body: B, prompt: Prompt | None, tools: ToolRequest, *, chat: bool) -> Generation:
        """Returns what a body asks.  prompt: None if there is none.  Raises RequestError."""
        given = body.options or NO_OPTIONS
        for name, neutral in OTHER_SAMPLERS.items():
            if getattr(given, name) not in neutral:
                raise FieldError(
                    f"options.{name}", "not supported by this server; leave it out", code="unsupported_parameter"
                )
        if prompt is None and body.keep_alive == 0:
            raise FieldError("keep_alive", "0 asks to unload the model, which stays in memory until the server ends")
        name = served_name(body.model, self._translator)
        shared = GenerationBody(
            model=name,
            stream=body.stream is not False,
            response_format=_response_format(body.format),
            repetition_penalty=given.repeat_penalty,
            **{same: getattr(given, same) for same in SAME_OPTIONS},
        )
        most = given.num_predict if given.num_predict is not None and given.num_predict > 0 else None
        return self._translator.translate(
            shared,
            (LOADING_PROMPT if prompt is None else prompt,),
            max_tokens=1 if prompt is None else most,
            prompt_only=prompt is None,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            effort=_effort(body),
            tools=tools,
            chat=self._chat_options(body, tools) if chat else ChatOptions(),
        )

    def _chat_options(self, body: B, tools: ToolRequest) -> ChatOptions:
        allowed = self._translator.card.template_variables
        switches = (
            {} if body.think is None else {name: bool(body.think) for name in THINKING_VARIABLES if name in allowed}
        )
        return ChatOptions(
            tools=tools.described, variables=read_variables(switches, _effort(body), allowed), split_reasoning=True
        )


class OllamaChat(_TextEndpoint[OllamaChatBody]):
    """POST /api/chat."""

    operation: ClassVar[Operation] = generating(
        "/api/chat",
        "Answer a conversation, as Ollama does.",
        answer=ChatLine,
        body=OllamaChatBody,
        event=ChatLine,
        framing="lines",
        error=OllamaError,
        span="chat",
    )
    body_type = OllamaChatBody

    def translate(self, body: OllamaChatBody) -> Generation:
        functions = [ToolBody("function", tool.function) for tool in body.tools or ()]
        tools = read_tools(functions, None, parallel=None, form=self._translator.tool_format)
        turns = read_messages(body.messages, sees=self._translator.sees) if body.messages else None
        return self._generation(body, turns, tools, chat=turns is not None)

    def rename(self, field: str, body: OllamaChatBody) -> str:
        return "messages" if field == "prompt" else super().rename(field, body)

    def writer(self, body: OllamaChatBody, generation: Generation, usage: UsageCounter) -> ChatLines:
        return ChatLines(body.model, generation, usage)


class OllamaGenerate(_TextEndpoint[OllamaGenerateBody]):
    """POST /api/generate."""

    operation: ClassVar[Operation] = generating(
        "/api/generate",
        "Answer a prompt, as Ollama does.",
        answer=GenerateLine,
        body=OllamaGenerateBody,
        event=GenerateLine,
        framing="lines",
        error=OllamaError,
        span="text_completion",
    )
    body_type = OllamaGenerateBody

    def translate(self, body: OllamaGenerateBody) -> Generation:
        for name in ("suffix", "template", "context"):
            if getattr(body, name):
                raise FieldError(
                    name,
                    "not supported by this server; send the whole conversation to /api/chat",
                    code="unsupported_parameter",
                )
        pictures = self._pictures(body)
        if not body.prompt and not pictures:
            return self._generation(body, None, NO_TOOLS, chat=False)
        if body.raw:
            return self._generation(body, body.prompt, NO_TOOLS, chat=False)
        turns = [ChatTurn("system", body.system)] if body.system else []
        asked = ChatTurn("user", body.prompt or "", pictures=pictures, places=(0,) * len(pictures))
        return self._generation(body, (*turns, asked), NO_TOOLS, chat=True)

    def _pictures(self, body: OllamaGenerateBody) -> tuple[Picture, ...]:
        if not self._translator.sees:
            no_images(body.images, "images")
            return ()
        if body.raw and body.images:
            raise FieldError("images", "not possible together with raw: the chat template says where they stand")
        return read_images(body.images, "images")

    def rename(self, field: str, body: OllamaGenerateBody) -> str:
        return "prompt" if field == "messages" else super().rename(field, body)

    def writer(self, body: OllamaGenerateBody, generation: Generation, usage: UsageCounter) -> GenerateLines:
        return GenerateLines(body.model, generation, usage)


def _effort(body: OllamaBody) -> str | None:
    return body.think if isinstance(body.think, str) else None


def _response_format(form: msgspec.Raw) -> ResponseFormat | None:
    """Returns the form of the answer.  Raises RequestError."""
    if not is_given(form) or bytes(form) == b'""':
        return None
    if bytes(form) == b'"json"':
        return ResponseFormat("json_object")
    if not bytes(form).startswith(b"{"):
        raise FieldError("format", "must be 'json' or a JSON Schema, which is an object")
    return ResponseFormat("json_schema", JsonSchemaFormat(form))
