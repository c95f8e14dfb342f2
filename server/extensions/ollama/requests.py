"""Bodies of Ollama's API.

Owns: field names and JSON types.  Does not know: what they ask of the engine.
A stream is the default there.  ``keep_alive`` says how long a model stays in memory; here it stays, so nothing is done.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from server.openai.requests import MAX_TOOLS, MAX_TURNS, FunctionBody, Int, Short, TopLogprobs, not_given

KeepAlive = Int | float | Short | None


class OllamaOptions(msgspec.Struct, frozen=True):
    """The ways to pick tokens.  num_predict: most tokens; below 0 for no limit of its own.

    What says how to run a model (``num_ctx``, ``num_gpu``, ``num_thread`` and such) is the server's own business here
    and is left out."""

    num_predict: Int | None = None
    seed: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: Int | None = None


class CalledTool(msgspec.Struct, frozen=True):
    """A function that was called.  arguments: an object."""

    name: Short
    arguments: dict[str, Any] | None = None


class OllamaCallBody(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier."""

    function: CalledTool
    id: Short = ""


class OllamaTurn(msgspec.Struct, frozen=True):
    """One message.  tool_name, tool_call_id: of a tool's answer, the call that it answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[msgspec.Raw] | None = None
    tool_calls: Annotated[list[OllamaCallBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: Short | None = None
    tool_call_id: Short | None = None


class OllamaTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    function: FunctionBody
    type: Literal["function"] | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints that write text.

    format: 'json', or a JSON Schema.  think: whether the model thinks first, or how hard."""

    model: str
    stream: bool | None = True
    format: msgspec.Raw = msgspec.field(default_factory=not_given)
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[OllamaTurn], Meta(max_length=MAX_TURNS)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/generate.  raw: the prompt is read as it is, without the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Int] | None = None
    images: list[msgspec.Raw] | None = None


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show.  name: the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
