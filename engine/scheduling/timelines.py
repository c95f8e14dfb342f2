"""When each request went from one state to the next, kept for a while after its end.

Owns: those marks, when executors were gone, the log of steps, which request had which cached pages evicted.
Does not know: what they mean for a request (``explanation.py``), who asks.
A mark is made where something happens to a request, never for a step that it merely runs in.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Literal, NamedTuple

from engine.kv.eviction import Candidate, EvictionListener, EvictionStrategy, SortKey
from engine.kv.node import Handle, chained
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.rows import Sequence
from engine.scheduling.step_log import StepLog

MOST_KEPT = 4096  # requests that have ended, about 1 KB each
MOST_MARKS = 256  # of one request; one that is retracted more often loses marks in the middle
MOST_LOSSES = 256
MOST_EVICTED = 1 << 14  # pages, about 200 bytes each
MOST_EVICTORS = 8  # named for one request

State = Literal["queue", "no_room", "aside", "fetch", "prefill", "decode", "retracted", "lost"]


class Mark(NamedTuple):
    """From ``at`` on, seconds of the planner's clock, a request was in this state."""

    at: float
    state: State


class Timeline(NamedTuple):
    """A request that has ended.  missed: request -> cached pages that its start evicted and this one computed again.

    grammar_s: seconds in which its grammar was compiled, before it was queued."""

    metrics: RequestMetrics
    marks: tuple[Mark, ...]
    missed: dict[int, int]
    grammar_s: float


class Timelines:
    """ended: by request, oldest first.

    losses: from when until when executors were gone, the last maybe until infinity."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.ended: OrderedDict[int, Timeline] = OrderedDict()
        self.losses: list[tuple[float, float]] = []
        self.steps = StepLog()
        self._clock = clock

    def take_over(self, other: "Timelines") -> None:
        """Have what another one has had, which is used no more."""
        self.ended, self.losses, self.steps = other.ended, other.losses, other.steps

    def mark(self, sequence: Sequence, state: State) -> None:
        """The sequence is in another state from now on."""
        if len(sequence.marks) >= MOST_MARKS:
            del sequence.marks[3:5]
        sequence.marks.append(Mark(self._clock(), state))
        if state == "prefill" and self.losses and self.losses[-1][1] == math.inf:
            self.losses[-1] = self.losses[-1][0], self._clock()

    def lost(self, running: Items[Sequence]) -> None:
        """The executors are gone, with the rows of those that ran."""
        self.losses = [*self.losses[1 - MOST_LOSSES :], (self._clock(), math.inf)]
        for sequence in running:
            self.mark(sequence, "lost")

    def end(self, sequence: Sequence, metrics: RequestMetrics) -> None:
        """Keep what is known of a request, and forget the oldest one."""
        self.ended[metrics.request_id] = Timeline(metrics, tuple(sequence.marks), sequence.missed, sequence.grammar_s)
        if len(self.ended) > MOST_KEPT:
            self.ended.popitem(last=False)


class Evictions:
    """The eviction strategy, which notes for whom each page left.

    request_id: who gets the pages that are evicted next.  The pages are known by their chained hashes."""

    def __init__(self, strategy: EvictionStrategy, page_bytes: int) -> None:
        self.request_id = -1
        self.rank: Callable[[Candidate], SortKey] = strategy.rank
        self._tell = strategy.evicted if isinstance(strategy, EvictionListener) else None
        self._page_bytes = page_bytes
        self._evictors: OrderedDict[bytes, int] = OrderedDict()

    def evicted(self, candidate: Candidate) -> None:
        """See ``EvictionListener``."""
        evictors = self._evictors
        for page in candidate.page_hashes:
            evictors[page] = self.request_id
            evictors.move_to_end(page)
        while len(evictors) > MOST_EVICTED:
            evictors.popitem(last=False)
        if self._tell is not None:
            self._tell(candidate)

    def forget(self) -> None:
        """All pages were lost at once, whoever had others evicted before."""
        self._evictors.clear()

    def note_missed(self, sequence: Sequence, handle: Handle, key: bytes) -> None:
        """A sequence starts: of its pages behind the handle's, those are told that were there until evicted."""
        if not self._evictors or handle.node is None:
            return
        tail = key[handle.num_pages * self._page_bytes :]
        for page in chained(handle.node.page_hashes[-1], tail, self._page_bytes):
            evictor = self._evictors.get(page)
            if evictor is None or (evictor not in sequence.missed and len(sequence.missed) >= MOST_EVICTORS):
                return
            sequence.missed[evictor] = sequence.missed.get(evictor, 0) + 1
