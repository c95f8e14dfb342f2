"""The time at which each request went from one state to the next, kept for a while after its end.

Owns: those marks, the times without executors, the last steps with the prompts that each computed, in rings of fixed
size, and which request caused the eviction of which cached pages.
Does not know: what they mean for a request (``explanation.py``), what reads them.
A mark is made when something happens to a request, never for a step that it merely runs in.
"""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.features.explain.session_turns import SessionTurn, SessionTurns, TurnDifference
from engine.kv.eviction import Candidate
from engine.kv.node import Handle, chained
from engine.messages import Admit
from engine.scheduling.events import PlannerWatcher, Why
from engine.scheduling.meter import RequestMetrics, StepRecord
from engine.scheduling.rows import Sequence
from engine.types.versions import NOTE

MOST_KEPT = 4096  # requests that have ended, about 1 KB each
MOST_MARKS = 256  # of one request; one that is retracted more often loses marks in the middle
MOST_LOSSES = 256
MOST_EVICTED = 1 << 14  # pages, about 200 bytes each
MOST_EVICTORS = 8  # named for one request
SESSION = "sessions"  # the part of requests in a session
NUM_STEPS = 1 << 16  # 3 MB; eleven minutes of steps of 10 ms
NUM_CHUNKS = 1 << 15
MOST_NOTES = 64  # different ones
STEP = np.dtype(
    [
        ("step_id", "<i8"), ("began_at", "<f8"), ("completed_at", "<f8"), ("num_decodes", "<i4"),
        ("num_prefill_tokens", "<i4"), ("num_copied", "<i4"), ("note", "<i4"),
    ]
)  # fmt: skip
CODES = {"i4": "i", "i8": "q", "f8": "d"}  # NumPy's names, and those of struct
CHUNK = np.dtype([("step_id", "<i8"), ("request_id", "<i8"), ("num_tokens", "<i4")])

State = Why | Literal["prefill", "decode", "retracted", "lost"]


class Mark(NamedTuple):
    """A state of a request from ``at`` on, in seconds of the planner's clock."""

    at: float
    state: State


class Timeline(NamedTuple):
    """A request that has ended.

    missed: request -> cached pages that its start evicted and this one computed again.
    grammar_s: seconds in which its grammar was compiled, before it was queued.
    num_recomputed: cached tokens that it computed again for want of a state behind them.
    difference: from a turn of its session.
    versions: marks of the weights that drew its tokens."""

    metrics: RequestMetrics
    marks: tuple[Mark, ...]
    missed: dict[int, int]
    grammar_s: float
    num_recomputed: int = 0
    difference: TurnDifference | None = None
    versions: bytes = b""


class Ring:
    """A ring of the last ``capacity`` records.  dtype: a record of numbers without padding."""

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
        """Return a copy of the records, oldest first."""
        rows: npt.NDArray[np.void] = np.frombuffer(self._buffer, dtype=self._dtype)
        at = self._num_noted % self._capacity
        return rows[:at].copy() if self._num_noted < self._capacity else np.concatenate((rows[at:], rows[:at]))


class StepLog:
    """The last steps.

    steps: records of ``STEP``.  chunks: records of ``CHUNK``.  notes: texts by the number in a step's ``note``."""

    def __init__(self) -> None:
        self.steps = Ring(STEP, NUM_STEPS)
        self.chunks = Ring(CHUNK, NUM_CHUNKS)
        self.notes: list[str] = [""]

    def completed(self, step: StepRecord) -> None:
        """Append a step that has completed."""
        note = step.note
        if note and note not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(note)
        self.steps.note(
            step.step_id,
            step.began_at,
            step.completed_at,
            step.num_decodes,
            step.num_prefill_tokens,
            step.num_copied,
            self.notes.index(note) if note and note in self.notes else 0,
        )


@dataclass(slots=True)
class OpenTimeline:
    """A request that has not ended.  session: its client and name.  Other fields are those of ``Timeline``."""

    grammar_s: float = 0.0
    num_recomputed: int = 0
    marks: list[Mark] = field(default_factory=list)
    missed: dict[int, int] = field(default_factory=dict)
    session: tuple[str, str] | None = None
    difference: TurnDifference | None = None


class Timelines(PlannerWatcher):
    """The timelines of all requests of an engine, also over several planners.

    open: by request.  ended: by request, oldest first.
    turns: the last ones of sessions.
    losses: start and end of each time without executors; the last end may be infinity.
    clock: seconds; a different one from the planner's, whose readings are recorded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open: dict[int, OpenTimeline] = {}
        self.ended: OrderedDict[int, Timeline] = OrderedDict()
        self.losses: list[tuple[float, float]] = []
        self.steps = StepLog()
        self.turns = SessionTurns()
        self._clock = clock
        self._evictors: OrderedDict[bytes, int] = OrderedDict()

    def arrived(self, sequence: Sequence, message: Admit) -> None:
        """Note the time before the arrival, and compare the prompt with the last turns of its session."""
        line = self.open[sequence.request_id]
        line.grammar_s = message.check_s
        if (part := message.parts.get(SESSION)) is not None:
            line.session = sequence.origin.client, part.digest
            line.difference = self.turns.difference(line.session, sequence.tokens)

    def completed(self, step: StepRecord) -> None:
        """Pass a step on to the log of steps."""
        self.steps.completed(step)

    def waits(self, sequence: Sequence, why: Why) -> None:
        """Mark the wait, unless the last mark is the same."""
        marks = self.open.setdefault(sequence.request_id, OpenTimeline()).marks
        if why != "no_room" or marks[-1].state != "no_room":
            self._mark(sequence, why)

    def recomputes(self, sequence: Sequence, num_tokens: int) -> None:
        """Count cached tokens that are of no use."""
        self.open[sequence.request_id].num_recomputed += num_tokens

    def started(self, sequence: Sequence, *, is_first: bool) -> None:
        """Mark the start.  It also ends a time without executors."""
        self._mark(sequence, "prefill")
        if self.losses and self.losses[-1][1] == math.inf:
            self.losses[-1] = self.losses[-1][0], self._clock()

    def computed(self, sequence: Sequence, step_id: int, num_tokens: int) -> None:
        """Append a chunk of a prompt."""
        self.steps.chunks.note(step_id, sequence.request_id, num_tokens)

    def decodes(self, sequence: Sequence) -> None:
        """Mark the end of the prompt."""
        self._mark(sequence, "decode")

    def retracted(self, sequence: Sequence) -> None:
        """Mark the retraction."""
        self._mark(sequence, "retracted")

    def lost(self, running: Items[Sequence]) -> None:
        """Begin a time without executors.  The pages of all requests are lost at once."""
        self._evictors.clear()
        self.losses = [*self.losses[1 - MOST_LOSSES :], (self._clock(), math.inf)]
        for sequence in running:
            self._mark(sequence, "lost")

    def finished(self, sequence: Sequence, metrics: RequestMetrics) -> None:
        """Keep the timeline of a request that has ended, and forget the oldest one."""
        line = self.open.pop(metrics.request_id)
        self.ended[metrics.request_id] = Timeline(
            metrics,
            tuple(line.marks),
            line.missed,
            line.grammar_s,
            line.num_recomputed,
            line.difference,
            sequence.notes.get(NOTE, b""),
        )
        if line.session is not None and metrics.ttft_s is not None:
            turn = SessionTurn(metrics.request_id, sequence.num_prompt, sequence.tokens[:-1].copy())
            self.turns.keep(line.session, turn)
        if len(self.ended) > MOST_KEPT:
            self.ended.popitem(last=False)

    def _mark(self, sequence: Sequence, state: State) -> None:
        marks = self.open[sequence.request_id].marks
        if len(marks) >= MOST_MARKS:
            del marks[3:5]
        marks.append(Mark(self._clock(), state))

    # ---- evictions --------------------------------------------------------------------------

    def evicted(self, request_id: int, candidate: Candidate) -> None:
        """Note which request caused the eviction of pages.  Pages are known by their chained hashes."""
        evictors = self._evictors
        for page in candidate.page_hashes:
            evictors[page] = request_id
            evictors.move_to_end(page)
        while len(evictors) > MOST_EVICTED:
            evictors.popitem(last=False)

    def matched(self, sequence: Sequence, handle: Handle, key: bytes, page_bytes: int) -> None:
        """Note the pages after those of the handle that were in the cache until they were evicted."""
        if not self._evictors or handle.node is None:
            return
        missed = self.open[sequence.request_id].missed
        for page in chained(handle.node.page_hashes[-1], key[handle.num_pages * page_bytes :], page_bytes):
            evictor = self._evictors.get(page)
            if evictor is None or (evictor not in missed and len(missed) >= MOST_EVICTORS):
                return
            missed[evictor] = missed.get(evictor, 0) + 1
