"""Rows whose output follows a grammar or may not take every token: their matchers, and masks of allowed tokens.

Legend: N sampled rows of the step · R of them with a grammar · V vocabulary · W words of a mask
Owns: a matcher per row and the thread that advances them.  Does not know: steps, how tokens are picked.

A mask depends on the token before it, which may still be on the device when the next step is launched.  So the thread
waits for that token and computes the mask while the forward pass of the next step runs; the caller reads the mask after
it has queued that pass.  The scheduler plans ahead as usual.

A row whose last mask took long is slow.  Its next mask is computed in another thread as soon as its token is known, and
not with those of the next step: a row that sits out the steps until then delays none of them.  That thread rests after
each mask, so that slow rows leave the processor to the others, unless a step waits for it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.text.grammar import GrammarFailure, Grammars, Matcher
from engine.text.token_limits import TokenLimits
from engine.types.errors import RequestError
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


BUDGET_TOKENS = 16  # tokens over which the time of a row is summed
BUDGET_S = 0.02  # per token, for all rows of a step together
LEAST_BUDGET_S = 0.005  # per token of one row, however many rows there are
LATE_S = 0.002  # of work; a row whose mask took longer is slow
REST = 3.0  # of a slow mask's time: beside other rows, the slow ones take a quarter of one core together
LATE_MASKS: Final = "late_masks"  # the part of a result: slow rows whose next mask is not ready


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed tokens of R rows of a step.

    at_R: int64, indices into the N rows.  words_RW: int32 bits, set for allowed tokens; a row of zeros fails.
    failures: index into N -> why its grammar cannot continue."""

    at_R: Tensor
    words_RW: Tensor
    failures: dict[int, str]

    def apply(self, logits_NV: Tensor) -> Tensor:
        """Forbid tokens in place and return the unchanged rows, raw_RV."""
        raw_RV = logits_NV.index_select(0, self.at_R)
        bits = torch.arange(32, dtype=torch.int32, device=raw_RV.device)
        allowed_RV = ((self.words_RW[:, :, None] >> bits) & 1).flatten(1)[:, : raw_RV.shape[1]] != 0
        # Added, not filled in: a NaN anywhere in a row must survive, so that the row fails.
        penalty_RV = torch.zeros_like(raw_RV).masked_fill_(~allowed_RV, -torch.inf)
        logits_NV.index_copy_(0, self.at_R, raw_RV + penalty_RV)
        return raw_RV

    def restore(self, logits_NV: Tensor, raw_RV: Tensor) -> None:
        """Undo ``apply``."""
        logits_NV.index_copy_(0, self.at_R, raw_RV)


@dataclass(slots=True)
class _Row:
    """A row with a grammar or token limits.

    matcher: in construction.  last: returns the last sampled token, which the matcher has not consumed.
    failure: why the matcher cannot continue; kept, as a step that runs out of memory requests its masks again.
    took_s: processor time of each of its last tokens."""

    matcher: "Future[Matcher]"
    last: Callable[[], int] | None = None
    failure: str = ""
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=BUDGET_TOKENS))

    @property
    def is_slow(self) -> bool:
        """Whether its last mask took long."""
        return bool(self.took_s) and self.took_s[-1] > LATE_S and not self.failure


class PendingMasks:
    """Masks in computation."""

    def __init__(self, at: Int64, future: "Future[tuple[Int32, dict[int, str]]]", device: torch.device) -> None:
        self._at = at
        self._future = future
        self._device = device

    def result(self) -> Masks:
        """Wait for the masks and return them."""
        words, failures = self._future.result()
        return Masks(
            self._upload(self._at), self._upload(words), {int(self._at[index]): why for index, why in failures.items()}
        )

    def _upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


class Constraints:
    """The grammars of all rows of one rank.  Equal calls on every rank give equal masks.

    grammars: None if requests with a grammar are refused.
    rows: rows that have, or had, a grammar or limits; while it is empty, no other method needs a call.
    ahead: row -> its next mask, which may not be ready, of slow rows; for reading only.
    clock: seconds of this thread's work.
    must_agree: there are other ranks, whose clocks differ, so that no row ends because of its time."""

    def __init__(
        self,
        grammars: Grammars | None,
        vocab_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.thread_time,
        must_agree: bool = False,
    ) -> None:
        self._clock = clock
        self._must_agree = must_agree
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self.rows: dict[int, _Row] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._slow_worker = ThreadPoolExecutor(1, thread_name_prefix="slow-grammar")
        self.ahead: dict[int, Future[tuple[Int32, str]]] = {}  # masks and failures by row, of slow ones
        self._rest_s = 0.0  # before the next slow mask
        self._awaited = threading.Event()  # set while a step waits for a slow mask
        self._num_at_once = 1

    def admit(self, row: int, params: SamplingParams, token_ids: Int32, num_prompt_tokens: int) -> None:
        """Assign a row to a sequence.  token_ids: its prompt, then output kept over a retraction."""
        self.rows.pop(row, None)
        self.ahead.pop(row, None)
        if params.is_constrained:
            output = token_ids[num_prompt_tokens:].tolist()
            self.rows[row] = _Row(self._worker.submit(self._open, params, output))

    def begin(self, rows_N: Int64) -> PendingMasks | None:
        """Start the masks of the rows that have a grammar or limits; return None if there are none."""
        if not self.rows:
            return None
        at = np.array([index for index, row in enumerate(rows_N.tolist()) if row in self.rows], dtype=np.int64)
        if not len(at):
            return None
        rows = [(self.rows[row], self.ahead.get(row)) for row in rows_N[at].tolist()]
        self._num_at_once = len(rows)
        return PendingMasks(at, self._worker.submit(self._fill, rows), self._device)

    def sampled(self, rows_N: Int64, tokens: Callable[[], Int64]) -> None:
        """Register a step's samples, to be consumed before the next mask.  tokens: waits for the device, int64[N]."""
        for index, number in enumerate(rows_N.tolist()):
            row = self.rows.get(number)
            if row is not None:
                row.last = lambda index=index: int(tokens()[index])
                if row.is_slow:
                    self.ahead[number] = self._slow_worker.submit(self._next_slow, row, self._num_at_once)
                else:
                    self.ahead.pop(number, None)

    def late(self) -> Callable[[], bytes]:
        """Return the encoder of the part ``LATE_MASKS``, for the step that is launched last."""
        ahead = dict(self.ahead)
        return lambda: msgspec.msgpack.encode([row for row, mask in ahead.items() if not mask.done()])

    def close(self) -> None:
        """End the threads."""
        self._awaited.set()
        for worker in (self._worker, self._slow_worker):
            worker.shutdown(wait=False, cancel_futures=True)

    def _open(self, params: SamplingParams, output: list[int]) -> Matcher:
        matcher: Matcher | None = None
        if params.grammar is not None:
            assert self._grammars is not None, "a request with a grammar came to an engine that refuses them"
            matcher = self._grammars.matcher(params.grammar)
        if matcher is None or params.limits_tokens:
            matcher = TokenLimits(params, self._num_words, matcher)
        for token_id in output:
            matcher.consume(token_id)
        return matcher

    def _fill(self, rows: "list[tuple[_Row, Future[tuple[Int32, str]] | None]]") -> tuple[Int32, dict[int, str]]:
        words = np.zeros((len(rows), self._num_words), dtype=np.int32)
        failures: dict[int, str] = {}
        for index, (row, ahead) in enumerate(rows):
            words[index], failure = self._next(row, len(rows)) if ahead is None else self._wait_for(ahead)
            if failure:
                words[index] = 0
                failures[index] = f"the grammar of this request cannot go on{failure}"
        return words, failures

    def _wait_for(self, mask: "Future[tuple[Int32, str]]") -> tuple[Int32, str]:
        self._awaited.set()
        try:
            return mask.result()
        finally:
            self._awaited.clear()

    def _next_slow(self, row: _Row, num_rows: int) -> tuple[Int32, str]:
        """Return what ``_next`` returns, after the rest that the mask before it requires."""
        self._awaited.wait(self._rest_s)
        mask = self._next(row, num_rows)
        self._rest_s = REST * row.took_s[-1]
        return mask

    def _next(self, row: _Row, num_rows: int) -> tuple[Int32, str]:
        """Return a row's next mask, and why there is none or ''.  num_rows: rows with a grammar in a step."""
        words = np.zeros(self._num_words, dtype=np.int32)
        if not row.failure:
            token_id = row.last() if row.last is not None else -1  # waits for the device, and may raise its errors
            row.last = None
            began = self._clock()
            row.failure = self._advance(row, token_id, words)
            if not row.failure:
                row.took_s.append(self._clock() - began)
                row.failure = "" if self._must_agree else _overdue(row, num_rows)
        return words, row.failure

    def _advance(self, row: _Row, token_id: int, words: Int32) -> str:
        """Advance the row's matcher by a token and write the next mask.  Returns why that failed, or ''."""
        try:
            matcher = row.matcher.result()
            if token_id >= 0:  # a row with a negative token has failed and is not read any more
                matcher.consume(token_id)
            matcher.fill(words)
        except (GrammarFailure, RequestError) as error:
            return f": {error}"
        except BaseException:  # a plugin may raise any error
            name = "none" if self._grammars is None else self._grammars.name
            log.exception("a matcher of plugin %s raised an error; its request ends", name)
            return "; the server log has the details"
        return ""


def _overdue(row: _Row, num_rows: int) -> str:
    """Return why a row's grammar is too slow for the step that all rows share; '' if it is not."""
    budget_s = max(BUDGET_S / num_rows, LEAST_BUDGET_S) * BUDGET_TOKENS
    if (took_s := sum(row.took_s)) <= budget_s:
        return ""
    return (
        f": it is too ambiguous to follow, {took_s * 1e3:.0f} ms for the last {len(row.took_s)} tokens, at most "
        f"{budget_s * 1e3:.0f} ms are allowed"
    )
