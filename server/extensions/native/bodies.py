"""Bodies of POST /generate, which are SGLang's.

Owns: field names and JSON types.  Does not know: what they mean.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.types.params import MAX_TOKEN_COUNT
from server.generate.output import FinishReason, WeightVersions
from server.openai.requests import Int, Priority, Salt, SamplingFields, Short, TokenId, TopLogprobs

MaxNewTokens = Annotated[int, Meta(ge=0, le=MAX_TOKEN_COUNT)]
Logprob = tuple[float | None, int, str | None]


class NativeParams(SamplingFields, frozen=True, kw_only=True):
    """The ways to pick tokens and to stop."""

    max_new_tokens: MaxNewTokens | None = None
    min_new_tokens: Int | None = None
    sampling_seed: Int | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None


class NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of text and input_ids: one prompt, or several.  What may be a list has an entry for each prompt then.

    rid: what the request is called, and the answer.  request_id: what else the request is called.
    stream_output: events have what is new, not all there is."""

    sealed: ClassVar[Mapping[str, type[msgspec.Struct]]] = MappingProxyType({"sampling_params": NativeParams})
    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeParams | list[NativeParams] | None = None
    model: str | None = None
    rid: Short | list[Short] | None = None
    request_id: Short | None = None
    stream: bool | None = None
    stream_output: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int | list[Int] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    token_ids_logprob: list[TokenId | list[TokenId]] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class OnePrompt(msgspec.Struct, frozen=True):
    """The wishes of a body for one of its prompts.

    prompt_start: from which prompt token on log probabilities are wanted; -1 for none.  named: of which other tokens
    they are wanted."""

    params: NativeParams
    logprobs: bool
    num_top: int
    prompt_start: int
    named: list[int]


class NativeFinish(msgspec.Struct, frozen=True):
    """The reason that an output ended.  matched: the stop string or token.  length: the most tokens it could have."""

    type: FinishReason
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET


class NativeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """About one output.  A log probability is [value, token id, text], the text null unless asked for.

    The first token of a prompt has no value, and no likely ones."""

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[Logprob] | UnsetType = UNSET
    input_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_token_logprobs: list[Logprob] | UnsetType = UNSET
    output_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class NativeOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One output, or what there is of it so far.  index: which, where there are several."""

    text: str
    output_ids: list[int]
    meta_info: NativeInfo
    index: int | UnsetType = UNSET
