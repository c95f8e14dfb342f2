"""The last steps, and the prompts that each of them computed, in rings of fixed size.

Owns: two packed tables, and the few notes that executors make of a step.  Does not know: requests but by id, who asks.
A step costs one ``pack_into``, and one more for each chunk of a prompt in it; all else is paid by who asks.
"""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.messages import Step
from engine.scheduling.meter import StepRecord

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
