"""The waiting queue: sequences without a row, in the order of the policy, behind the quarantine.

Owns: their order; which sequences were under way when executors were lost, how often in a row, and which of them runs
alone.  Does not know: why they wait, why executors were lost, pages, rows.

The quarantine finds the request that ends the executors, by elimination, so that it ends and not the engine.  A loss
blames nobody: a process may be killed from outside.  Sequences that two losses in a row have met at the same place,
without getting past it in between, then run one at a time.  Most get past it.  One that is lost again, while nothing
else runs, is the culprit.  The quarantine stands in front of the waiting queue, where all rows are given.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.scheduling.policy import SchedulingPolicy, SortKey, TenantPolicy
from engine.scheduling.rows import RowTable, Sequence

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


def waiting_queue(policy: SchedulingPolicy, table: RowTable) -> WaitingQueue:
    """The queue that serves a policy.  table: where those have rows whom it lets go first."""
    if isinstance(policy, TenantPolicy):
        return TenantQueue(policy, table)
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
class _Lane:
    """A tenant's requests.  place: of its entry in the heap, which an older one does not have."""

    queue: RankedQueue
    place: int


class TenantQueue:
    """A lane for each tenant of whom something waits, and a heap of whose turn it is.

    Turns only rise while a tenant waits, so one that has risen is noticed when it comes to the top.  What running
    requests have got is read off the row table when somebody may start or a tenant returns, never in a steady step."""

    def __init__(self, policy: TenantPolicy, table: RowTable) -> None:
        self._policy = policy
        self._table = table
        self._lanes: dict[str, _Lane] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._num_waiting = 0
        self._num_places = 0
        self._lowest = 0.0
        # By row: whose it is, which request that is of, and how many of its tokens the policy knows of.
        self._tenants = ["" if sequence is None else sequence.tenant for sequence in table.sequences]
        self._request_ids = np.where(table.running, table.request_ids, -1)
        self._num_told = table.num_known.copy()

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._lanes:
            self._tell()
            self.first()
            self._policy.returned(tenant, self._lowest)
            self._lanes[tenant] = _Lane(RankedQueue(self._policy.rank), 0)
            self._line_up(tenant)
        self._lanes[tenant].queue.push(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        self._num_waiting -= 1
        queue = self._lanes[sequence.tenant].queue
        queue.remove(sequence)
        if not len(queue):
            del self._lanes[sequence.tenant]

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        """Tell the policy what was served; turns are asked for as they matter."""
        self._tell()

    def first(self) -> Sequence | None:
        asked: set[str] = set()  # once each: a turn may rise with time
        while self._heap:
            turn, place, tenant = self._heap[0]
            if not self._is_valid(place, tenant):
                heapq.heappop(self._heap)
            elif tenant not in asked and (now := self._policy.turn(tenant)) > turn:
                asked.add(tenant)
                heapq.heapreplace(self._heap, (now, place, tenant))
            else:
                self._lowest = max(self._lowest, turn)
                return self._lanes[tenant].queue.first()
        return None

    def pop(self, *, starts: bool) -> Sequence:
        first = self.first()
        assert first is not None, "nobody waits"
        tenant, table, row = first.tenant, self._table, first.row
        self.remove(first)
        if starts:
            self._tenants[row], self._request_ids[row] = tenant, first.request_id
            self._num_told[row] = table.num_known[row]
            # What the engine does a second time is not charged again.
            if first.started_at is None:
                self._policy.served(tenant, int(table.num_known[row] - table.num_computed[row]), 0)
            if tenant in self._lanes:
                self._line_up(tenant)
        return first

    def _line_up(self, tenant: str) -> None:
        """Behind all whose turn is the same."""
        self._num_places += 1
        self._lanes[tenant].place = self._num_places
        heapq.heappush(self._heap, (self._policy.turn(tenant), self._num_places, tenant))
        if len(self._heap) > 2 * len(self._lanes) + 8:
            self._heap = [entry for entry in self._heap if self._is_valid(*entry[1:])]
            heapq.heapify(self._heap)

    def _is_valid(self, place: int, tenant: str) -> bool:
        """Whether a tenant still stands at that place."""
        return tenant in self._lanes and self._lanes[tenant].place == place

    def _tell(self) -> None:
        """What each tenant has got since the last time.  A row keeps its numbers until somebody else has it."""
        table = self._table
        gained = np.where(table.request_ids == self._request_ids, table.num_known - self._num_told, 0)
        rows = np.flatnonzero(gained)
        self._num_told[rows] = table.num_known[rows]
        outputs: Counter[str] = Counter()
        for row, count in zip(rows.tolist(), gained[rows].tolist(), strict=True):
            outputs[self._tenants[row]] += count
        for tenant, count in outputs.items():
            self._policy.served(tenant, 0, count)


@dataclass(slots=True)
class _Record:
    """num_losses: in a row, before the sequence had ``place`` tokens computed."""

    num_losses: int
    place: int


class Quarantine:
    """A ``WaitingQueue`` in front of another one: as long as there are suspects it gives rows to one of them at a time.

    alone: the suspect that has its row; nothing else runs then."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.alone: Sequence | None = None
        self._waiting = waiting
        self._records: dict[int, _Record] = {}
        self._suspects: deque[Sequence] = deque()

    @property
    def is_on(self) -> bool:
        """Whether a suspect runs alone, or waits for that."""
        return self.alone is not None or bool(self._suspects)

    def lets_wait(self) -> bool:
        """A suspect is the only one to run when its turn comes, and so must not give it up for a while."""
        return not self.is_on

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
            sequence = self._waiting.pop(starts=starts)
        else:
            sequence = self._suspects.popleft()
            if starts:
                self.alone = sequence
        return sequence
