"""The waiting queue: sequences without a row, in the order of the policy.

Owns: their order.  Does not know: why they wait, pages, rows.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.scheduling.policy import SchedulingPolicy, SortKey, TenantPolicy
from engine.scheduling.rows import RowTable, Sequence

WINDOW = 128  # Sequences that a policy that looks at the cache ranks anew: one look-up each, 2 us.


class WaitingQueue(Protocol):
    """An order of waiting sequences.  ``rerank`` is called before a round of ``first`` and ``pop``."""

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None:
        """Add a sequence; one that comes back takes its old place among equals."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from any place in the queue."""
        ...

    def rerank(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        """Rank the sequences by the present content of the cache, if the policy looks at it."""
        ...

    def first(self) -> Sequence | None:
        """Return the sequence that is next; None if the queue is empty."""
        ...

    def pop(self, *, starts: bool) -> Sequence:
        """Remove and return ``first``, which must exist.  starts: it gets a row, and so overtakes earlier arrivals."""
        ...

    def lets_wait(self) -> bool:
        """Return whether a sequence may give up its turn."""
        return True

    def moved_to(self, other: "WaitingQueue") -> "WaitingQueue":
        """Move all sequences to another queue.  Return the queue to use."""
        while len(self):
            self.rerank(lambda sequence: 0)
            other.push(self.pop(starts=False))
        return other


def waiting_queue(policy: SchedulingPolicy, table: RowTable) -> WaitingQueue:
    """Return the queue for a policy.  table: the row table in which the sequences that it returns get rows."""
    if isinstance(policy, TenantPolicy):
        return TenantQueue(policy, table)
    return RerankedQueue(policy.rank) if policy.looks_at_cache else RankedQueue(policy.rank)


class RankedQueue(WaitingQueue):
    """A heap by rank, then age.  A sequence that is removed out of turn is freed at once, with its prompt: only its
    number stays in the heap, until its turn comes or such numbers are most of the heap."""

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
        """Do nothing: ranks stay as they are."""

    def first(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][1]] if self._heap else None

    def pop(self, *, starts: bool) -> Sequence:
        sequence = self.first()
        assert sequence is not None, "no sequence waits"
        heapq.heappop(self._heap)
        return self._waiting.pop(sequence.arrival)


class RerankedQueue(WaitingQueue):
    """A queue for policies that look at the cache.

    A window of the sequences that would be first if nothing were cached is ranked anew each time; the rest wait."""

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
    """A tenant's requests.  place: number of its entry in the heap; older entries have other numbers."""

    queue: RankedQueue
    place: int


class TenantQueue(WaitingQueue):
    """A lane for each tenant with waiting requests, and a heap of the tenants' turns.

    Turns only rise while a tenant waits, so a risen one is noticed when it comes to the top.  The tokens of running
    requests are read from the row table when a sequence may start or a tenant returns, never in a steady step."""

    def __init__(self, policy: TenantPolicy, table: RowTable) -> None:
        self._policy = policy
        self._table = table
        self._lanes: dict[str, _Lane] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._num_waiting = 0
        self._num_places = 0
        self._lowest = 0.0
        # By row: its tenant, its request, and how many of its tokens the policy has counted.
        self._tenants = ["" if sequence is None else sequence.tenant for sequence in table.sequences]
        self._request_ids = np.where(table.running, table.request_ids, -1)
        self._num_told = table.num_known.copy()

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._lanes:
            self._report_output()
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
        """Report the served tokens to the policy.  Turns are read when they matter."""
        self._report_output()

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
        assert first is not None, "no sequence waits"
        tenant, table, row = first.tenant, self._table, first.row
        self.remove(first)
        if starts:
            self._tenants[row], self._request_ids[row] = tenant, first.request_id
            self._num_told[row] = table.num_known[row]
            # Tokens that are computed a second time are not charged again.
            if first.started_at is None:
                self._policy.served(tenant, int(table.num_known[row] - table.num_computed[row]), 0)
            if tenant in self._lanes:
                self._line_up(tenant)
        return first

    def _line_up(self, tenant: str) -> None:
        """Put a tenant into the heap, after all tenants with the same turn."""
        self._num_places += 1
        self._lanes[tenant].place = self._num_places
        heapq.heappush(self._heap, (self._policy.turn(tenant), self._num_places, tenant))
        if len(self._heap) > 2 * len(self._lanes) + 8:
            self._heap = [entry for entry in self._heap if self._is_valid(*entry[1:])]
            heapq.heapify(self._heap)

    def _is_valid(self, place: int, tenant: str) -> bool:
        """Return whether an entry of the heap is the tenant's latest one."""
        return tenant in self._lanes and self._lanes[tenant].place == place

    def _report_output(self) -> None:
        """Report each tenant's new output tokens to the policy.  A row keeps its numbers until it is given again."""
        table = self._table
        gained = np.where(table.request_ids == self._request_ids, table.num_known - self._num_told, 0)
        rows = np.flatnonzero(gained)
        self._num_told[rows] = table.num_known[rows]
        outputs: Counter[str] = Counter()
        for row, count in zip(rows.tolist(), gained[rows].tolist(), strict=True):
            outputs[self._tenants[row]] += count
        for tenant, count in outputs.items():
            self._policy.served(tenant, 0, count)
