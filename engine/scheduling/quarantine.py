"""The quarantine: finds the request that ends the executors, by elimination, so that it ends and not the engine.

Owns: which sequences were under way when executors were lost, how often in a row, and which of them runs alone.
Does not know: why executors were lost, rows, pages.
A loss blames nobody: a process may be killed from outside.  Sequences that two losses in a row have met at the same
place, without getting past it in between, then run one at a time.  Most get past it.  One that is lost again, while
nothing else runs, is the culprit.  The quarantine stands in front of the waiting queue, where all rows are given.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.scheduling.queue import WaitingQueue
from engine.scheduling.sequence import Sequence

LOSSES_TO_SUSPECT = 2


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
