"""The rows with late masks in a simulated run, and the steps that they may be in.

Owns: which rows are late, and which are slow, as the results say.  Does not know: how a planner leaves them out.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.features.late_masks.planner import LateMasks
from engine.messages import Step, StepDone
from engine.scheduling.step_builder import InFlight
from server.extensions.chaos.sim.failures import SimIncorrect


class LateRows:
    """The late and slow rows of one planner.  A row is slow until its next mask is ready with the result before it."""

    def __init__(self) -> None:
        self._sampled: set[int] = set()
        self._late: set[int] = set()
        self._slow: set[int] = set()
        self._since: dict[int, int] = {}  # row -> the step that admitted its request

    def planned(self, step: Step, record: InFlight, before: Sequence[InFlight]) -> None:
        """Check a step.  record: its expected result.  before: the steps in flight.

        Raises SimIncorrect for a step that waits for a late mask while there is something else to do, and for a
        step with a slow row behind another one that has its token."""
        new = {admission.row for admission in step.admissions}
        self._since.update(dict.fromkeys(new, step.step_id))
        for rows in (self._sampled, self._late, self._slow):
            rows -= new
        self._sampled.update(record.sampled_rows.tolist())
        decodes = set(np.frombuffer(step.decode_rows, dtype=np.int32).tolist())
        if (late := decodes & self._late) and (before or decodes - late):
            raise SimIncorrect(f"step {step.step_id} waits for the masks of rows {sorted(late)}, which are late")
        if twice := decodes & self._slow & sampled_in(before):
            raise SimIncorrect(f"step {step.step_id} waits for slow rows {sorted(twice)} of a step before it")

    def completed(self, done: StepDone, record: InFlight, behind: Sequence[InFlight]) -> None:
        """Note a result.  behind: the steps in flight behind it."""
        if LateMasks.part in done.parts:
            named = msgspec.msgpack.decode(done.parts[LateMasks.part], type=tuple[int, ...])
            told = {row for row in named if self._since.get(row, 0) <= done.step_id}
            self._late = told & self._sampled
            self._slow -= sampled_in([record]) - told - sampled_in(behind)
            self._slow |= self._late


def sampled_in(records: Sequence[InFlight]) -> set[int]:
    """Return the rows that sample in any of these steps."""
    return {row for record in records for row in record.sampled_rows.tolist()}
