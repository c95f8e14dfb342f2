"""The body of POST /v1/responses.

Owns: field names and JSON types.  Does not know: what the items mean.
Where responses are stored a conversation goes on from one of them; elsewhere it is sent as a whole each time.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from server.openai.requests import (
    MAX_TOOLS,
    ContentPart,
    FunctionBody,
    FunctionChoice,
    GenerationBody,
    Scalar,
    Short,
    TokenCount,
    TopLogprobs,
    not_given,
)


class FlatTool(FunctionBody, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]


class FlatToolChoice(FunctionChoice, frozen=True, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]


class TextFormat(msgspec.Struct, frozen=True):
    """type: 'text', 'json_object' or 'json_schema'."""

    type: Short
    schema: msgspec.Raw = msgspec.field(default_factory=not_given)
    name: Short | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """What the answer looks like."""

    format: TextFormat | None = None
    verbosity: Short | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """effort: told to the chat template."""

    effort: Short | None = None
    summary: Short | None = None


class InputItem(msgspec.Struct, frozen=True):
    """A part of the conversation: a message, a call, what a call gave, or thoughts, by ``type``."""

    type: Short | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    id: Short | None = None
    call_id: Short | None = None
    name: Short | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponsesBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/responses.  Sampling fields as in the other endpoints."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[Short, Scalar] | None = None
    include: list[Short] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: dict[Short, Short] | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: Short | None = None
    prompt: msgspec.Raw = msgspec.field(default_factory=not_given)
    conversation: msgspec.Raw = msgspec.field(default_factory=not_given)
