"""One choice's output on its way to the client.

Owns: what is remembered of a choice, and words for how it ended.  Does not know: which endpoint it belongs to.
"""

from msgspec import UNSET, UnsetType

from engine.messages import Delta, Finish, TokenLogprobs
from server.openai_responses import FinishReason

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; this is what clients of other engines know
FINISH_REASONS: dict[Finish, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


class Output:
    """All output of a choice, for an answer in one piece."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | UnsetType = UNSET
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        """Append new output."""
        self._texts.append(delta.text)
        self.logprobs += delta.logprobs
        self.finish_reason = finish_reason(delta)
        self.stop_reason = stop_reason(delta)

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self._texts)


class Cursor:
    """How far the stream of a choice has got.  num_chars: characters of the tokens whose logprobs were sent."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started = False
        self.num_chars = 0


def finish_reason(delta: Delta) -> FinishReason | None:
    """The API's word for how a choice ended, None while it runs."""
    return FINISH_REASONS.get(delta.finish)


def stop_reason(delta: Delta) -> str | int | UnsetType:
    """The stop string or token id that ended a choice, if one did."""
    return UNSET if delta.stop_reason is None else delta.stop_reason


def finite(logprob: float) -> float:
    """A log probability that JSON can carry.  Written so that NaN fails the comparison."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
