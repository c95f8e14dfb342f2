"""The waiting queue: sequences without a row, in the order of the policy, behind the quarantine.

Owns: their order; which sequences were under way when executors were lost, how often in a row, and which of them runs
alone.  Does not know: why they wait, why executors were lost, pages, rows.

The quarantine finds the request that ends the executors, by elimination, so that it ends and not the engine.  A loss
blames nobody: a process may be killed from outside.  Sequences that two losses in a row have met at the same place,
without getting past it in between, then run one at a time.  Most get past it.  One that is lost again, while nothing
else runs, is the culprit.  The quarantine stands in front of the waiting queue, where all rows are given.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.policy import SchedulingPolicy, SortKey
from engine.scheduling.rows import Sequence

WINDOW = 128  # How many are ranked anew by policies that look at the cache: a look-up each, 2 us.
LOSSES_TO_SUSPECT = 2


class WaitingQueue(Protocol):
    """Who is next.  ``rerank`` comes before a round of ``first`` and ``pop``."""

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None:
        """Line up; a sequence that comes back takes its old place among equals."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Leave from wherever it stands."""
        ...

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        """Take note of what the cache holds now."""
        ...

    def first(self) -> Sequence | None:
        """The next in turn; None if nobody waits."""
        ...

    def pop(self, *, starts: bool) -> Sequence:
        """Take ``first`` out; there must be one.  starts: it overtakes those who arrived earlier."""
        ...


def waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """The queue that serves a policy."""
    return RerankedQueue(policy.rank) if policy.looks_at_cache else RankedQueue(policy.rank)


class RankedQueue:
    """A heap by rank, then age.  A sequence that leaves out of turn is gone at once, prompt and all: only its number
    stays in the heap, until its turn comes or such numbers are most of the heap."""

    def __init__(self, rank: Callable[[Sequence], SortKey]) -> None:
        self._rank = rank
        self._heap: list[tuple[SortKey, int]] = []
        self._waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._rank(sequence), sequence.arrival))
        self._waiting[sequence.arrival] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.arrival]
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        """Ranks stay as they are."""

    def first(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][1]] if self._heap else None

    def pop(self, *, starts: bool) -> Sequence:
        sequence = self.first()
        assert sequence is not None, "nobody waits"
        heapq.heappop(self._heap)
        return self._waiting.pop(sequence.arrival)


class RerankedQueue:
    """A window of those who would be first if nothing were cached is ranked anew each time; the others wait behind."""

    def __init__(self, rank: Callable[[Sequence], SortKey]) -> None:
        self._rank = rank
        self._window: list[tuple[SortKey, int, Sequence]] = []
        self._others = RankedQueue(self._rank_uncached)

    def _rank_uncached(self, sequence: Sequence) -> SortKey:
        sequence.num_cached_now = 0
        return self._rank(sequence)

    def __len__(self) -> int:
        return len(self._window) + len(self._others)

    def push(self, sequence: Sequence) -> None:
        self._others.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        kept = [entry for entry in self._window if entry[2] is not sequence]
        if len(kept) == len(self._window):
            self._others.remove(sequence)
        self._window = kept

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        for _, _, sequence in self._window:
            self._others.push(sequence)
        sequences = [self._others.pop(starts=False) for _ in range(min(WINDOW, len(self._others)))]
        for sequence in sequences:
            sequence.num_cached_now = num_cached_tokens(sequence)
        self._window = sorted((self._rank(sequence), sequence.arrival, sequence) for sequence in sequences)

    def first(self) -> Sequence | None:
        return self._window[0][2] if self._window else None

    def pop(self, *, starts: bool) -> Sequence:
        _, arrival, sequence = self._window.pop(0)
        for _, other_arrival, other in self._window:
            other.num_overtaken += starts and other_arrival < arrival
        return sequence


@dataclass(slots=True)
class _Record:
    """num_losses: in a row, before the sequence had ``place`` tokens computed."""

    num_losses: int
    place: int


class Quarantine:
    """A ``WaitingQueue`` in front of another one: as long as there are suspects it gives rows to one of them at a time.

    alone: the suspect that has its row; nothing else runs beside it."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.alone: Sequence | None = None
        self._waiting = waiting
        self._records: dict[int, _Record] = {}
        self._suspects: deque[Sequence] = deque()

    @property
    def is_on(self) -> bool:
        """Whether a suspect runs alone, or waits for that."""
        return self.alone is not None or bool(self._suspects)

    # ---- losses -----------------------------------------------------------------------------

    def note_loss(self, sequence: Sequence, num_done: int, num_planned: int) -> bool:
        """Executors were lost with this sequence under way.  Returns whether that makes it the culprit.

        num_done: its tokens that completed steps have computed.  num_planned: those and the ones on their way."""
        record = self._records.get(sequence.request_id)
        if record is None or num_done >= record.place:
            record = self._records[sequence.request_id] = _Record(0, 0)
        record.num_losses += 1
        # One more: a sequence that fails wherever it decodes gets a token further by being prefilled again.
        record.place = num_planned + 1
        return sequence is self.alone

    def begin(self) -> None:
        """No sequence has a row any more: whatever ``push`` gets next is sorted anew."""
        self.alone = None

    def num_losses(self, sequence: Sequence) -> int:
        """In a row, with the sequence under way at one place."""
        record = self._records.get(sequence.request_id)
        return record.num_losses if record is not None else 0

    def acquit_all(self) -> None:
        """It was none of them: they wait like any request."""
        self._records.clear()
        suspects, self._suspects = self._suspects, deque()
        for sequence in suspects:
            self._waiting.push(sequence)

    def passes(self, num_done: int) -> bool:
        """The one that is alone has computed so much: whether that acquits it."""
        assert self.alone is not None, "no sequence runs alone"
        if num_done < self._records[self.alone.request_id].place:
            return False
        del self._records[self.alone.request_id]
        self.alone = None
        return True

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence is self.alone:
            self.alone = None
        self._records.pop(sequence.request_id, None)

    def reorder(self, waiting: WaitingQueue) -> None:
        """Have those that are no suspects wait in another queue."""
        old, self._waiting = self._waiting, waiting
        while len(old):
            old.rerank(lambda sequence: 0)
            waiting.push(old.pop(starts=False))

    # ---- as a waiting queue -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting) + len(self._suspects)

    def push(self, sequence: Sequence) -> None:
        if self.num_losses(sequence) >= LOSSES_TO_SUSPECT:
            self._suspects.append(sequence)
        else:
            self._waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        self._waiting.rerank(num_cached_tokens)

    def first(self) -> Sequence | None:
        if not self.is_on:
            return self._waiting.first()
        return self._suspects[0] if self.alone is None else None

    def pop(self, *, starts: bool) -> Sequence:
        if not self.is_on:
            return self._waiting.pop(starts=starts)
        sequence = self._suspects.popleft()
        if starts:
            self.alone = sequence
        return sequence
