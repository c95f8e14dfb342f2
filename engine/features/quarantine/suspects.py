"""The quarantine: it finds the request that ends the executors, by elimination, so that the engine does not end.

Owns: which sequences were under way when executors were lost, how often in a row, and which of them runs alone.
Does not know: why executors were lost, pages, rows.
A single loss blames no request: a process may be killed from outside.  Sequences that two losses in a row have met at
the same place, without getting past it in between, then run one at a time.  Most get past it.  One that is lost again,
while nothing else runs, is the culprit.  The quarantine wraps the waiting queue, since all rows are given there.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.scheduling.queue import WaitingQueue
from engine.scheduling.rows import Sequence

LOSSES_TO_SUSPECT = 2


@dataclass(slots=True)
class _Record:
    """The losses of one sequence.

    num_losses: number of losses in a row, before the sequence had ``place`` tokens computed."""

    num_losses: int
    place: int


class Quarantine(WaitingQueue):
    """A ``WaitingQueue`` around another one: as long as there are suspects it gives rows to one of them at a time.

    waiting: the queue of the others.  alone: the suspect that has its row; nothing else runs then."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.alone: Sequence | None = None
        self.waiting = waiting
        self._records: dict[int, _Record] = {}
        self._suspects: deque[Sequence] = deque()

    @property
    def has_records(self) -> bool:
        """Whether a sequence has been lost and has not got past that place."""
        return bool(self._records)

    @property
    def is_on(self) -> bool:
        """Whether a suspect runs alone, or waits to do so."""
        return self.alone is not None or bool(self._suspects)

    # ---- losses -----------------------------------------------------------------------------

    def note_loss(self, sequence: Sequence, num_done: int, num_planned: int) -> bool:
        """Note that executors were lost with this sequence under way.  Return whether that makes it the culprit.

        num_done: its tokens that completed steps have computed.  num_planned: those and the ones in flight."""
        record = self._records.get(sequence.request_id)
        if record is None or num_done >= record.place:
            record = self._records[sequence.request_id] = _Record(0, 0)
        record.num_losses += 1
        # Plus one: a sequence that fails wherever it decodes gets one token further by being prefilled again.
        record.place = num_planned + 1
        return sequence is self.alone

    def num_losses(self, sequence: Sequence) -> int:
        """Return the number of losses in a row with the sequence under way at one place."""
        record = self._records.get(sequence.request_id)
        return record.num_losses if record is not None else 0

    def acquit_all(self) -> None:
        """Clear all suspects: they wait like any other request."""
        self._records.clear()
        suspects, self._suspects = self._suspects, deque()
        for sequence in suspects:
            self.waiting.push(sequence)

    def passes(self, num_done: int) -> bool:
        """Return whether the sequence that runs alone is acquitted by having computed so many tokens."""
        assert self.alone is not None, "no sequence runs alone"
        if num_done < self._records[self.alone.request_id].place:
            return False
        del self._records[self.alone.request_id]
        self.alone = None
        return True

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        if sequence is self.alone:
            self.alone = None
        self._records.pop(sequence.request_id, None)

    # ---- the methods of a waiting queue -----------------------------------------------------

    def __len__(self) -> int:
        return len(self.waiting) + len(self._suspects)

    def push(self, sequence: Sequence) -> None:
        if self.num_losses(sequence) >= LOSSES_TO_SUSPECT:
            self._suspects.append(sequence)
        else:
            self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def lets_wait(self) -> bool:
        """Return False while there are suspects: nothing else runs when the turn of one comes."""
        return not self.is_on

    def moved_to(self, other: WaitingQueue) -> WaitingQueue:
        """Move all sequences but suspects to another queue, in which the others wait from now on."""
        self.waiting = self.waiting.moved_to(other)
        return self

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        self.waiting.rerank(num_cached_tokens)

    def first(self) -> Sequence | None:
        if not self.is_on:
            return self.waiting.first()
        return self._suspects[0] if self.alone is None else None

    def pop(self, *, starts: bool) -> Sequence:
        if not self.is_on:
            sequence = self.waiting.pop(starts=starts)
        else:
            sequence = self._suspects.popleft()
            if starts:
                self.alone = sequence
        return sequence
