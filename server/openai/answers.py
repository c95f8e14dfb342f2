"""Bodies that clients get, as the OpenAI API names them.

Owns: field names and which are left out, null or always there.  Does not know: where the values come from.
``UNSET`` fields are left out of the JSON.
"""

from datetime import datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.checkpoints.use import Kind
from engine.types.logprobs import TokenLogprobs
from server.generate.output import FinishReason, OptionalUsage, UsageBody, WeightVersions, finite


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the answer to a request and every chunk of it repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str


# ---- completions ----------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry per token.  text_offset counts characters of the choice's text.
    The first token of an echoed prompt has no probability: null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One output.  stop_reason: the stop string or token id of the request that ended it, where one did.

    matched_stop: the same, or else the end token of the model's own."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET
    matched_stop: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class TextCompletion(ResponseHead, frozen=True, kw_only=True):
    """The answer of /v1/completions, and every chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: OptionalUsage = UNSET


# ---- chat -----------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token.  bytes: its UTF-8, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The sampled token and the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def token_logprob(entry: TokenLogprobs) -> TokenLogprob:
    """Returns what the API says of a token's log probability and of its rivals'."""
    top = [TopLogprob(one.text, finite(one.logprob), list(one.utf8)) for one in entry.top]
    sampled = entry.sampled
    return TokenLogprob(sampled.text, finite(sampled.logprob), list(sampled.utf8), top)


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCallBody(msgspec.Struct, frozen=True):
    """A called function.  arguments: JSON as text."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, frozen=True):
    """A call of a function."""

    id: str
    function: FunctionCallBody
    type: Literal["function"] = "function"


class ChatAnswer(msgspec.Struct, frozen=True):
    """The assistant's message.  content: null if it is nothing but calls.
    reasoning_content and reasoning: what it thought, under both names that clients know."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One output."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET
    matched_stop: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class ChatCompletion(ResponseHead, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    """The name once, then arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of a call; id and type in its first part only."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """The news of a choice: the role once, then text."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One output's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    matched_stop: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class ChatChunk(ResponseHead, frozen=True, kw_only=True):
    """One event of a chat stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: OptionalUsage = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- models ---------------------------------------------------------------------------------


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be asked for.  kind: what it is for.  root: the model whose weights these are.

    parent: the model that this is an adapter of; null for the model.  loaded: of one of several models; that and its
    length are not known before it was loaded.  type, display_name, created_at: as Anthropic's clients read it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: datetime
    owned_by: Literal["callboard"] = "callboard"
    max_model_len: int | UnsetType = UNSET
    kind: Kind | UnsetType = "generate"
    loaded: bool | UnsetType = UNSET
    root: str
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them.  has_more, first_id, last_id: as Anthropic's clients read it."""

    object: Literal["list"] = "list"
    data: list[ModelBody]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def model_list(models: list[ModelBody]) -> ModelList:
    """Returns the answer of GET /v1/models."""
    return ModelList(data=models, first_id=models[0].id, last_id=models[-1].id)
