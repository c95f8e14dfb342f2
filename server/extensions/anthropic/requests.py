"""Bodies of POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API names them.

Owns: field names and JSON types.  Does not know: what blocks mean, ranges.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from server.openai.requests import (
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TURNS,
    FunctionName,
    Int,
    Priority,
    Salt,
    Scalar,
    Short,
    TokenCount,
)


class BlockSource(msgspec.Struct, frozen=True):
    """The content of a document or an image.  data: text, or base64.  url, file_id: of an image, in place of it."""

    type: Short
    data: str | None = None
    media_type: Short | None = None
    url: str | None = None
    file_id: Short | None = None
    content: "str | list[BlockBody] | None" = None


class CacheControl(msgspec.Struct, frozen=True):
    """The wish to keep what comes before.  ttl: how long; '5m' and '1h' are known."""

    ttl: Short | None = None


class BlockBody(msgspec.Struct, frozen=True):
    """A part of a message, by ``type``: text, thinking, tool_use, tool_result, or what becomes text.

    content: an object only in results of tools that ran elsewhere.  source: of a search result, where it was found."""

    type: Short
    text: str | None = None
    thinking: str | None = None
    id: Short | None = None
    name: Short | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Short | None = None
    content: "str | list[BlockBody] | dict[str, Any] | None" = None
    is_error: bool | None = None
    source: BlockSource | str | None = None
    title: str | None = None
    context: str | None = None
    tool_name: Short | None = None
    cache_control: CacheControl | None = None


class MessageBody(msgspec.Struct, frozen=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockBody], Meta(max_length=MAX_PARTS)]


class MessageTool(msgspec.Struct, frozen=True):
    """A tool.  type: None and 'custom' are a function with an ``input_schema``; others are known by their type."""

    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Short | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, frozen=True):
    """The choice of a tool.  any: some function must be called; tool: that one."""

    type: Literal["auto", "any", "tool", "none"]
    name: Short | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, frozen=True):
    """The wish to think first, which the chat template gets.  budget_tokens: of thoughts, at most."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The form that the answer must have."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, frozen=True):
    """The form of the answer.  effort: the chat template gets it as reasoning_effort."""

    format: OutputFormat | None = None
    effort: Short | None = None


class Metadata(msgspec.Struct, frozen=True):
    """The sender.  user_id: clients put the session in it."""

    user_id: Short | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str
    messages: Annotated[list[MessageBody], Meta(max_length=MAX_TURNS)]
    system: str | list[BlockBody] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[Short, Scalar] | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """POST /v1/messages.  output_format: the older place of output_config.format."""

    max_tokens: TokenCount
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    output_format: OutputFormat | None = None
    metadata: Metadata | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
