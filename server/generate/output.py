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
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        """Append new output."""
        self._deltas.append(delta)

    @property
    def delta(self) -> Delta:
        """Everything so far, as one delta."""
        self._deltas = [Delta.merged(self._deltas)]
        return self._deltas[0]

    @property
    def mean_logprob(self) -> float:
        """How likely the whole output was per token, for comparing."""
        entries = self.delta.logprobs
        return sum(finite(entry.sampled.logprob) for entry in entries) / max(1, len(entries))


def finish_reason(delta: Delta) -> FinishReason | None:
    """The API's word for how a choice ended, None while it runs."""
    return FINISH_REASONS.get(delta.finish)


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
