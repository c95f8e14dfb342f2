"""Answers and events that clients of /v1/messages get.

Owns: field names and which are always there.  Does not know: where the values come from.
"""

from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.types.errors import RequestError
from server.generate.output import WeightVersions
from server.http.replies import MAX_MESSAGE_CHARS, ErrorFormat

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnnouncedEvent(msgspec.Struct, frozen=True):
    """An event, which is announced by its ``type``."""

    @property
    def type(self) -> str:
        """The event's name."""
        return str(self.__struct_config__.tag)


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """The text of the assistant."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """The thoughts of the model.  signature: nothing is signed here, and none is asked for when thoughts come back."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a function."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; the prompt's are the sum of three.  cache_read_input_tokens: those found in the prefix cache.

    cache_creation_input_tokens: those that this request has put there.  input_tokens: the rest, of no whole page."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The answer.  weight_versions: as in chat completions, after weights have changed."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    weight_versions: WeightVersions = UNSET


class TokenCountAnswer(msgspec.Struct, frozen=True):
    """The number of tokens of a prompt."""

    input_tokens: int


class MessageErrorDetail(msgspec.Struct, frozen=True):
    """The failure."""

    type: str
    message: str


class MessageError(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The whole body of an error response, and an event, which names no request."""

    error: MessageErrorDetail
    request_id: str | UnsetType = UNSET


def message_error(error: RequestError, request_id: str | UnsetType = UNSET) -> MessageError:
    """Returns an error as this API has it."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    detail = MessageErrorDetail(kind, error.message[:MAX_MESSAGE_CHARS])
    return MessageError(error=detail, request_id=request_id)


def message_errors(request_id: str) -> ErrorFormat:
    """Returns the format of a request's errors."""
    return partial(message_error, request_id=request_id)


# ---- events ---------------------------------------------------------------------------------


class MessageStart(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """The answer before it has content."""

    message: MessageObject


class BlockStart(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class InputDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments, as JSON."""

    partial_json: str


class BlockDelta(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    """The end of the answer."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    weight_versions: WeightVersions = UNSET


class MessageDelta(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """The answer's end and its token counts."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(AnnouncedEvent, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """No more events come."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError
