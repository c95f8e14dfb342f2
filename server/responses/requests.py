"""The body of POST /v1/responses.

Owns: field names and JSON types.  Does not know: what the items mean.
Where responses are stored a conversation goes on from one of them; elsewhere it is sent as a whole each time.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from server.openai.requests import (
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TURNS,
    ContentPart,
    FunctionName,
    GenerationBody,
    Scalar,
    Short,
    TokenCount,
    TopLogprobs,
    not_given,
)


class CustomFormat(msgspec.Struct, frozen=True):
    """What a custom tool takes: text, or text of a grammar, of which the model is told."""

    type: Short
    syntax: Short | None = None
    definition: str | None = None


class MemberTool(msgspec.Struct, frozen=True):
    """A function that the model may call, or a custom tool, which takes one text.  parameters: as ``FunctionBody``."""

    type: Short
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class FlatTool(MemberTool, frozen=True):
    """A tool, by ``type``: of those, or one that its type says all of.  tools: of a namespace."""

    tools: Annotated[list[MemberTool], Meta(max_length=MAX_TOOLS)] | None = None


class FlatToolChoice(msgspec.Struct, frozen=True):
    """The tool that must be called; of type 'allowed_tools' the only ones that may be, or must if ``mode`` says so."""

    type: Short
    name: Short | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[MemberTool], Meta(max_length=MAX_TOOLS)] | None = None


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
    """A part of the conversation: a message, a call, what a call gave, or thoughts, by ``type``.

    input, action, operation: of calls of tools that are no functions.  namespace: of the tool that was called."""

    type: Short | None = None
    role: str | None = None
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    id: Short | None = None
    call_id: Short | None = None
    name: Short | None = None
    namespace: Short | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: str | list[dict[str, Any]] | dict[str, Any] | None = None
    status: Short | None = None


class ResponsesBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/responses.  Sampling fields as in the other endpoints."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_TURNS)]
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
