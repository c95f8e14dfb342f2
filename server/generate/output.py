"""One choice's output on its way to the client, and how its parts are shown.

Owns: what is remembered of a choice, and words for how it ended.  Does not know: which endpoint it belongs to.
"""

from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from engine.messages import Delta, Finish, TokenLogprobs, TokenText

FinishReason = Literal["stop", "length", "abort", "tool_calls"]
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; this is what clients of other engines know
FINISH_REASONS: dict[Finish, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


class Output:
    """All output of a choice, for an answer in one piece."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.embedding = b""
        self.token_ids = b""
        self.prompt_token_ids = b""
        self.finish = Finish.RUNNING
        self.stop_reason: str | int | UnsetType = UNSET
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def add(self, delta: Delta) -> None:
        """Append new output."""
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.embedding += delta.embedding
        self.token_ids += delta.token_ids
        self.prompt_token_ids += delta.prompt_token_ids
        self.finish = delta.finish
        self.stop_reason = stop_reason(delta)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """What the model thought before the text."""
        return "".join(self._thoughts)

    @property
    def total_logprob(self) -> float:
        """How likely the whole output was, for comparing."""
        return sum(finite(entry.sampled.logprob) for entry in self.logprobs)


def finish_reason(output: Delta | Output) -> FinishReason | None:
    """The API's word for how a choice ended, None while it runs."""
    return FINISH_REASONS.get(output.finish)


def stop_reason(delta: Delta) -> str | int | UnsetType:
    """The stop string or token id that ended a choice, if one did."""
    return UNSET if delta.stop_reason is None else delta.stop_reason


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
    return TokenLogprobs(_token_by_id(entry.sampled), tuple(map(_token_by_id, entry.top)))


def _token_by_id(token: TokenText) -> TokenText:
    return msgspec.structs.replace(token, text=f"token_id:{token.token_id}")


def finite(logprob: float) -> float:
    """A log probability that JSON can carry.  Written so that NaN fails the comparison."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
