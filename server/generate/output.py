"""A generation's output on its way to the client: each choice's, its token counts, and the events that are only text.

Owns: what is remembered of a choice, words for how it ended, the sums of tokens, and what is the same in all events
that say no more than a piece of text: that is encoded once for each choice, which saves three quarters of their cost.
Does not know: which endpoint it belongs to, or its formats.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from engine.actors.stream import merged
from engine.messages import Delta, Finish
from engine.types.logprobs import TokenLogprobs, TokenText
from engine.types.versions import versions
from server.generate.generation import Generation

FinishReason = Literal["stop", "length", "abort", "tool_calls"]
WeightVersions = list[tuple[int, str]] | UnsetType
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; this is what clients of other engines know
FINISH_REASONS: dict[Finish, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}
TOKEN_ID_BYTES = 4
MARK = "\ue000text\ue000"  # of a private plane of Unicode: in no model's name
TOKENS = (b"\0\0\0\0", b"\1\0\0\0\2\0\0\0")  # one, and two others


class Output:
    """All output of a choice, for an answer in one piece."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        """Append new output."""
        self._deltas.append(delta)

    @property
    def delta(self) -> Delta:
        """Everything so far, as one delta."""
        self._deltas = [merged(self._deltas)]
        return self._deltas[0]

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the output's tokens, for comparing."""
        entries = self.delta.logprobs
        return sum(finite(entry.sampled.logprob) for entry in entries) / max(1, len(entries))


def finish_reason(delta: Delta) -> FinishReason | None:
    """The API's word for how a choice ended, None while it runs."""
    return FINISH_REASONS.get(delta.finish)


def stop_reason(delta: Delta) -> str | int | UnsetType:
    """The stop string or token id that ended a choice, if one did."""
    return UNSET if delta.stop_reason is None else delta.stop_reason


def matched_stop(delta: Delta) -> str | int | UnsetType:
    """Returns ``stop_reason``, or the end token that the model chose itself, as SGLang does."""
    if delta.finish != Finish.STOP or not delta.token_ids:
        return stop_reason(delta)
    return unpacked(delta.token_ids[-TOKEN_ID_BYTES:])[0] if delta.stop_reason is None else delta.stop_reason


def weight_versions(delta: Delta) -> WeightVersions:
    """Return the versions of weights that drew the tokens, each with its first token; none for the first weights."""
    return versions(delta.result) if delta.result else UNSET


def ids(packed: bytes, shown: bool = True) -> list[int] | UnsetType:
    """Token ids for JSON; left out unless ``shown``.  packed: int32[n]."""
    return unpacked(packed) if shown else UNSET


def unpacked(packed: bytes) -> list[int]:
    """Token ids.  packed: int32[n]."""
    numbers: list[int] = np.frombuffer(packed, dtype=np.int32).tolist()
    return numbers


def by_id(delta: Delta) -> Delta:
    """The delta with every token of its log probabilities named by its id."""
    if not delta.logprobs and not delta.prompt_logprobs:
        return delta
    return msgspec.structs.replace(
        delta,
        logprobs=tuple(map(_entry_by_id, delta.logprobs)),
        prompt_logprobs=tuple(map(_entry_by_id, delta.prompt_logprobs)),
    )


def _entry_by_id(entry: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(sampled=_token_by_id(entry.sampled), top=tuple(map(_token_by_id, entry.top)))


def _token_by_id(token: TokenText) -> TokenText:
    return msgspec.structs.replace(token, text=f"token_id:{token.token_id}")


def finite(logprob: float) -> float:
    """A log probability that JSON can carry.  Written so that NaN fails the comparison."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """The part of the prompt that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """The part of the completion that was thought and not answer; tokens that were proposed for it, and right or
    not."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def __add__(self, other: "CompletionTokensDetails") -> "CompletionTokensDetails":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return CompletionTokensDetails(*(one + another for one, another in pairs))


NO_DETAILS = CompletionTokensDetails()


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


OptionalUsage = UsageBody | None | UnsetType


class UsageCounter:
    """Counts deltas as they pass.

    A prompt counts once however many choices it has, and so do its cached tokens: they are those of its first
    choice, since the others find in the cache what the first one put there.
    prompt_tokens: of each prompt, None until the engine has counted them.
    created_tokens: of each prompt, those that its first choice has put into the cache.
    """

    def __init__(self, generation: Generation) -> None:
        num_prompts = len(generation.prompts)
        self._num_choices = generation.num_choices
        self.prompt_tokens: list[int | None] = [None] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self.created_tokens = [0] * num_prompts
        self._details = [NO_DETAILS] * (num_prompts * generation.num_choices)
        self._completion_tokens = [0] * (num_prompts * generation.num_choices)
        self._marks = b""

    def add(self, index: int, delta: Delta) -> None:
        """Count new output of a choice."""
        self._completion_tokens[index] += len(delta.token_ids) // TOKEN_ID_BYTES
        if delta.result and index == 0:
            self._marks += delta.result
        if delta.usage is None:
            return
        prompt, k = divmod(index, self._num_choices)
        self.prompt_tokens[prompt] = delta.usage.prompt_tokens
        if k == 0:
            self._cached_tokens[prompt] = delta.usage.cached_tokens
            self.created_tokens[prompt] = delta.usage.created_tokens
        # What was aborted has no last word from the engine, only what was counted on the way.
        if delta.finish not in (Finish.RUNNING, Finish.ABORT):
            self._completion_tokens[index] = delta.usage.completion_tokens
            usage = delta.usage
            self._details[index] = CompletionTokensDetails(
                usage.reasoning_tokens, usage.accepted_tokens, usage.rejected_tokens
            )

    def of_choice(self, index: int) -> UsageBody | None:
        """The counts of one choice so far; None until the engine has counted its prompt."""
        prompt = index // self._num_choices
        num_prompt_tokens = self.prompt_tokens[prompt]
        if num_prompt_tokens is None:
            return None
        return _usage(
            num_prompt_tokens, self._completion_tokens[index], self._cached_tokens[prompt], self._details[index]
        )

    @property
    def weight_versions(self) -> WeightVersions:
        """The versions of weights that drew the only choice so far; see the function of this name."""
        return versions(self._marks) if self._marks else UNSET

    def total(self) -> UsageBody:
        """The counts of the whole request."""
        return _usage(
            sum(count or 0 for count in self.prompt_tokens),
            sum(self._completion_tokens),
            sum(self._cached_tokens),
            sum(self._details, NO_DETAILS),
        )


def _usage(prompt: int, completion: int, cached: int, details: CompletionTokensDetails) -> UsageBody:
    told = details if details != NO_DETAILS else UNSET
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached), told)


class PlainText:
    """Makes the events of one choice from parts that are encoded once."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._encode = msgspec.json.Encoder().encode

    @classmethod
    def like(cls, render: Callable[[Delta], Sequence[msgspec.Struct]]) -> "PlainText | None":
        """Returns the parts of what ``render`` makes of a piece of text in the middle of a stream.

        None if that is not one event, or one that says more of a token than its text."""
        one, other = (render(Delta(request_id=0, text=MARK, token_ids=token_ids)) for token_ids in TOKENS)
        if len(one) != 1 or one != other:
            return None
        before, mark, after = msgspec.json.encode(one[0]).partition(msgspec.json.encode(MARK))
        return cls(b"data: " + before, after + b"\n\n") if mark else None

    def event(self, delta: Delta) -> bytes:
        """The event of a delta that ``is_plain``."""
        return b"%b%b%b" % (self._before, self._encode(delta.text), self._after)


def is_plain(delta: Delta) -> bool:
    """Whether there is nothing in it but text, or a token that has none yet."""
    return bool(delta.token_ids) and delta == Delta(
        request_id=delta.request_id, text=delta.text, token_ids=delta.token_ids
    )
