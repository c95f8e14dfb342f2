"""Bodies that clients send, as the OpenAI API names them, plus the sampling fields that other engines added.

Owns: field names and JSON types.  Does not know: ranges (SamplingParams has them), defaults of the model, the engine.
``None`` is "not given" throughout: client libraries send explicit nulls.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.sampling.params import MAX_LOGPROBS, MAX_TOKEN_COUNT

# Ranges that JSON numbers must keep to whatever they are for: a longer integer is an attack on whoever prints it.
Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKEN_COUNT)]
Salt = Annotated[str, Meta(max_length=1024)]
Short = Annotated[str, Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints take."""

    model: str
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions.  prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions.  max_completion_tokens is the newer name of max_tokens and goes first."""

    messages: list[ChatMessage]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
