"""The waiting queue: sequences without a row, most urgent first.

Owns: their order.  Does not know: why they wait, pages, rows.
"""

import heapq

from engine.scheduling.sequence import Sequence


class WaitingQueue:
    """A heap by priority, then age.  Who leaves out of turn is struck off a set, and skipped when its turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._arrivals: set[int] = set()

    def __len__(self) -> int:
        return len(self._arrivals)

    def push(self, sequence: Sequence) -> None:
        """Line up; a sequence that comes back takes its old place."""
        heapq.heappush(self._heap, (sequence.rank_in_queue, sequence))
        self._arrivals.add(sequence.arrival)

    def remove(self, sequence: Sequence) -> None:
        """Leave from wherever it stands."""
        self._arrivals.remove(sequence.arrival)

    def first(self) -> Sequence | None:
        """The next in turn; None if nobody waits."""
        while self._heap and self._heap[0][1].arrival not in self._arrivals:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take ``first`` out; there must be one."""
        sequence = self.first()
        assert sequence is not None, "nobody waits"
        heapq.heappop(self._heap)
        self._arrivals.remove(sequence.arrival)
        return sequence
