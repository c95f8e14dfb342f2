"""The waiting queue: sequences without a row, in the order of the policy.

Owns: their order.  Does not know: why they wait, pages, rows.
"""

import heapq
from collections.abc import Callable
from typing import Protocol

from engine.scheduling.policy import SchedulingPolicy, SortKey
from engine.scheduling.sequence import Sequence

WINDOW = 128  # How many are ranked anew by policies that look at the cache: a look-up each, 2 us.


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
