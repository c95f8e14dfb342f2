"""The rows that sit steps out by turns in a simulated run, and how long each may.

Owns: the steps that each row has left.  Does not know: how a planner chooses rows.
The row of a tenant that has waited longest is the next one of it to decode, and no turn is longer than ``TURN`` steps
that have come back.  So a row waits for one turn for each row of its tenant that waits already, and for its own.
"""

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np

from engine.features.itl_target.turns import TURN
from engine.messages import Step
from server.extensions.chaos.sim.failures import SimIncorrect


class TurnRows:
    """The rows of one planner.  overlap: steps in flight, which are planned before the end of a turn is known."""

    def __init__(self, overlap: int) -> None:
        self._turn = TURN + overlap
        self._left: dict[int, int] = {}  # steps that a row may still sit out

    def planned(self, step: Step, out: Mapping[int, str], at_work: Collection[str]) -> None:
        """Check a step.  out: the rows that sit out what follows it, and their tenants.

        at_work: tenants with a row that does not.  Raises SimIncorrect for a row that has waited longer than its turn,
        and for a tenant whose rows all wait."""
        decodes = np.frombuffer(step.decode_rows, dtype=np.int32).tolist()
        for row in (*decodes, *(admission.row for admission in step.admissions)):  # their wait begins behind the step
            self._left.pop(row, None)
        waiting = Counter(out.values())
        self._left = {row: self._left.get(row, self._turn * waiting[tenant]) - 1 for row, tenant in out.items()}
        if late := [row for row, left in self._left.items() if left < 0]:
            raise SimIncorrect(f"step {step.step_id}: rows {late} have sat out more steps than their turn has")
        if idle := waiting.keys() - set(at_work):
            raise SimIncorrect(f"step {step.step_id}: all rows of {sorted(idle)} sit out")
