"""When each request went from one state to the next, kept for a while after its end.

Owns: those marks, when executors were gone, the last steps with the prompts that each computed, in rings of fixed size,
which request had which cached pages evicted.
Does not know: what they mean for a request (``explanation.py``), who asks.
A mark is made where something happens to a request, never for a step that it merely runs in.
"""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kv.eviction import Candidate, EvictionListener, EvictionStrategy, SortKey
from engine.kv.node import Handle, chained
from engine.messages import Step
from engine.scheduling.meter import RequestMetrics, StepRecord
from engine.scheduling.rows import Sequence

MOST_KEPT = 4096  # requests that have ended, about 1 KB each
MOST_MARKS = 256  # of one request; one that is retracted more often loses marks in the middle
MOST_LOSSES = 256
MOST_EVICTED = 1 << 14  # pages, about 200 bytes each
MOST_EVICTORS = 8  # named for one request
NUM_STEPS = 1 << 16  # 3 MB; eleven minutes of steps of 10 ms
NUM_CHUNKS = 1 << 15
MOST_IN_FLIGHT = 64
MOST_NOTES = 64  # different ones
STEP = np.dtype(
    [
        ("step_id", "<i8"), ("began_at", "<f8"), ("completed_at", "<f8"), ("num_decodes", "<i4"),
        ("num_prefill_tokens", "<i4"), ("num_copied", "<i4"), ("note", "<i4"),
    ]
)  # fmt: skip
CODES = {"i4": "i", "i8": "q", "f8": "d"}  # NumPy's names, and those of struct
CHUNK = np.dtype([("step_id", "<i8"), ("request_id", "<i8"), ("num_tokens", "<i4")])

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


class Ring:
    """The last ``capacity`` records.  dtype: of numbers, without padding."""

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self._dtype = dtype
        self._capacity = capacity
        types = [CODES[dtype[name].str[1:]] for name in dtype.names or ()]
        self._pack = struct.Struct("<" + "".join(types)).pack_into
        self._buffer = bytearray(capacity * dtype.itemsize)
        self._num_noted = 0

    def note(self, *values: float) -> None:
        """Append a record, in the place of the oldest one if the ring is full."""
        self._pack(self._buffer, self._num_noted % self._capacity * self._dtype.itemsize, *values)
        self._num_noted += 1

    def records(self) -> npt.NDArray[np.void]:
        """A copy, oldest first."""
        rows: npt.NDArray[np.void] = np.frombuffer(self._buffer, dtype=self._dtype)
        at = self._num_noted % self._capacity
        return rows[:at].copy() if self._num_noted < self._capacity else np.concatenate((rows[at:], rows[:at]))


class StepLog:
    """steps: records of ``STEP``; chunks: records of ``CHUNK``; notes: what a step's ``note`` means, 0 for nothing."""

    def __init__(self) -> None:
        self.steps = Ring(STEP, NUM_STEPS)
        self.chunks = Ring(CHUNK, NUM_CHUNKS)
        self.notes: list[str] = [""]
        self._copied: dict[int, int] = {}  # pages that come and go before a step, by steps in flight

    def planned(self, step: Step) -> Step:
        """Look at a step that is to run; returns it."""
        if step.transfer_to_host or step.landings:
            self._copied[step.step_id] = (
                len(step.transfer_to_host) + sum(len(one.pages) for one in step.landings)
            ) // 4
            while len(self._copied) > MOST_IN_FLIGHT:  # of executors that were lost
                del self._copied[min(self._copied)]
        return step

    def completed(self, step: StepRecord, note: str) -> None:
        """A step has completed.  note: what its executor says of it."""
        if note and note not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(note)
        self.steps.note(
            step.step_id,
            step.began_at,
            step.completed_at,
            step.num_decodes,
            step.num_prefill_tokens,
            self._copied.pop(step.step_id, 0) if self._copied else 0,
            self.notes.index(note) if note and note in self.notes else 0,
        )


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
