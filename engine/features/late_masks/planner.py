"""Late masks in the planner: rows whose grammar is slow sit steps out until their mask is ready.

Owns: which rows are slow, and which of them sit out.  Does not know: grammars, why a mask is late.
A plan follows from the results of steps alone, so a replay makes the same one.
"""

import msgspec

from engine.messages import StepDone
from engine.plugins.features import FeatureContext
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import InFlight, StepBuilder


class LateMasks(PlannerFeature):
    """The slow rows of one planner.  It is off before the first one."""

    part = "late_masks"
    is_on = False

    def __init__(self, parts: PlannerParts) -> None:
        self._features = parts.features
        self._table = parts.table
        self._decodes = parts.decodes
        self._completions = parts.completions
        self._slow: set[int] = set()
        self._out: set[int] = set()  # of the slow ones
        self._late: set[int] = set()  # as the last result says
        self._last_of: dict[int, int] = {}  # row -> the last step planned when a request left it

    def attach(self, step: StepBuilder) -> None:
        """Take the slow rows of the step out of those behind it."""
        for row in sorted(self._slow - self._out):  # the order of a set differs in a replay
            self._sit_out(row)

    def take(self, part: bytes, done: StepDone) -> bool:
        """Take out the rows whose masks are late, and return those whose masks are not.  Return False: none ends.

        A rank may still name a row whose request has left it, and which another one has got since."""
        told, last_of = msgspec.msgpack.decode(part, type=tuple[int, ...]), self._last_of
        self._late = {row for row in told if done.step_id > last_of.get(row, -1)}
        if self._late and not self.is_on:
            self.is_on = True
            self._features.refresh()
        self._keep_out()
        for row in sorted(self._out - self._late):
            if (last := self._table.last_step[row]) <= done.step_id:
                self._join(row)
                if last == done.step_id:
                    self._slow.discard(row)  # its next mask was ready at once
        return False

    def completed(self, record: InFlight, seconds: float) -> None:
        """Return all rows if nothing else is to do."""
        self._keep_out()
        self._join_if_idle()

    def left(self, row: int) -> None:
        """Forget a row, and return the others if it was the last that decodes: it may have been retracted."""
        for rows in (self._slow, self._out, self._late):
            rows.discard(row)
        self._last_of[row] = self._completions.last_completed + len(self._completions.in_flight)
        self._keep_out()
        self._join_if_idle()

    def reset(self) -> list[Sequence]:
        """Forget all rows."""
        for rows in (self._slow, self._out, self._late):
            rows.clear()
        self._last_of.clear()
        return []

    def _keep_out(self) -> None:
        """Take out the late rows that decode, and the slow ones of steps in flight: another feature may have returned
        them."""
        in_flight = {row for row in self._slow if self._table.last_step[row] > self._completions.last_completed}
        for row in sorted(self._late | in_flight):
            self._sit_out(row)

    def _sit_out(self, row: int) -> None:
        self._slow.add(row)
        if row in self._decodes.rows:  # it is not if the step in flight has its last token
            self._decodes.leave(row)
            self._out.add(row)

    def _join_if_idle(self) -> None:
        """Return all rows if no step would follow: one that they delay is better than none."""
        if self._out and not len(self._decodes) and not self._completions.in_flight:
            for row in sorted(self._out):
                self._join(row)

    def _join(self, row: int) -> None:
        self._out.discard(row)
        self._late.discard(row)
        self._decodes.join(row)


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature."""
    return LateMasks
