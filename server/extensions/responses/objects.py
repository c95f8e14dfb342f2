"""Bodies and events that clients of /v1/responses get.

Owns: field names and which are always there.  Does not know: where the values come from.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.generate.output import WeightVersions
from server.openai.answers import TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of thoughts."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: Status


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    status: Status


class ExecAction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="exec"):
    """The command for a client's shell: words."""

    command: list[str]
    env: dict[str, str] = {}


class LocalShellCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A call of the client's shell."""

    id: str
    call_id: str
    action: ExecAction
    status: Status


class ShellAction(msgspec.Struct, frozen=True, kw_only=True):
    """The command for a client's shell: lines, without limits that the model had asked for."""

    commands: list[str]
    timeout_ms: None = None
    max_output_length: None = None


class ShellCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="shell_call"):
    """A call of the newer shell of a client."""

    id: str
    call_id: str
    action: ShellAction
    status: Status


class PatchOperation(msgspec.Struct, frozen=True, kw_only=True):
    """The change of a file."""

    type: str
    path: str
    diff: str


class PatchCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="apply_patch_call"):
    """A change of a file."""

    id: str
    call_id: str
    operation: PatchOperation
    status: Status


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The thoughts of the model."""

    id: str
    summary: list[str] = []
    content: list[ReasoningText]
    status: Status


AnyCallItem = CallItem | CustomCallItem | LocalShellCallItem | ShellCallItem | PatchCallItem
Item = MessageItem | ReasoningItem | AnyCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The part of the input that came from the prefix cache.  Writing to it costs nothing, so it is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The part of the output that was thought and not answer."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The reason that an answer is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    """The reason that an answer failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer, and what was asked of it.  store: may turn false when the answer is there, and cannot be stored.

    weight_versions: as in chat completions, after weights have changed."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    background: bool = False
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    weight_versions: WeightVersions = UNSET


# ---- events ---------------------------------------------------------------------------------


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """An event of a stream; only the fields that its type has are there.  sequence_number: counts from 0."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
