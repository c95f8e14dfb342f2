"""The quarantine in the planner: requests that were under way when executors were lost run one at a time.

Owns: when it is on.  Does not know: which request is a suspect (``Quarantine`` does).
It is off until executors are lost, and again when every sequence that they had has ended or got past that place.
"""

from engine.features.quarantine.suspects import Quarantine
from engine.plugins.features import FeatureContext
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import PlannerLimits, Sequence
from engine.scheduling.step_builder import InFlight
from engine.types.errors import RequestError
from engine.types.notices import LossExplained


class QuarantinePlanner(PlannerFeature):
    """The quarantine of one planner."""

    order = 1  # the others have completed a step before a suspect loses its row
    is_on = False

    def __init__(self, parts: PlannerParts) -> None:
        self._features = parts.features
        self._table = parts.table
        self._prefills = parts.prefills
        self._completions = parts.completions
        self._num_completed = 0  # steps, when a request was last blamed
        self.quarantine = Quarantine(parts.prefills.queue)

    def _switch(self) -> None:
        """Switch on or off, as the records say."""
        self.is_on = self.quarantine.has_records or self.quarantine.is_on
        is_used = self._prefills.queue is self.quarantine
        if self.is_on and not is_used:
            self.quarantine.waiting, self._prefills.queue = self._prefills.queue, self.quarantine
        elif not self.is_on and is_used:
            self._prefills.queue = self.quarantine.waiting
        self._features.refresh()

    def retuned(self, limits: PlannerLimits) -> None:
        """Use the queue of the policy that is in force now."""
        if not self.is_on:
            self.quarantine.waiting = self._prefills.queue

    def lost(self, *, is_fault: bool) -> LossExplained | None:
        """Note a loss for every sequence in flight.  End the one that causes the losses, if it is known now."""
        culprit = self._note_loss() if is_fault else None
        num_losses = self.quarantine.num_losses(culprit) if culprit is not None else 0
        self.quarantine.alone = None
        if culprit is not None or not is_fault:
            self.quarantine.acquit_all()
        self._switch()
        if culprit is None:
            return None
        self._completions.fail(culprit.row, _blame(num_losses))
        before, self._num_completed = self._num_completed, self._completions.num_completed
        return LossExplained(num_losses=num_losses, executors_work=self._num_completed > before)

    def _note_loss(self) -> Sequence | None:
        culprit, table = None, self._table
        in_flight = self._completions.in_flight
        under_way = {row for record in in_flight for row in (*record.sampled_rows.tolist(), *record.prefill_rows)}
        for row in sorted(under_way):
            sequence = table.sequences[row]
            if sequence is None or not table.running[row]:
                continue
            if self.quarantine.note_loss(sequence, self._completions.num_done(row), int(table.num_computed[row])):
                culprit = sequence
        return culprit

    def waits(self, num_in_flight: int) -> bool:
        return num_in_flight > 0 and self.quarantine.is_on

    def completed(self, record: InFlight, seconds: float) -> None:
        """Retract the sequence that runs alone if it is past the place where executors were lost; the next follows."""
        quarantine, alone = self.quarantine, self.quarantine.alone
        if not quarantine.is_on:
            return
        if alone is not None and quarantine.passes(self._completions.num_done(alone.row)):
            if quarantine.is_on:
                self._completions.retract(alone)
            self._switch()
        self._prefills.unblock()

    def ended(self, sequence: Sequence) -> None:
        self.quarantine.forget(sequence)
        self._switch()


def _blame(num_losses: int) -> RequestError:
    return RequestError(
        f"this request ended the model's executors {num_losses} times in a row, the last time while "
        "nothing else ran; it was ended so that other requests go on.  The server log says what happened; "
        "the same request is likely to fail again",
        status=500,
        code="executors_lost",
    )


def planner_feature(context: FeatureContext) -> NewFeature:
    """Return the builder of the feature, which every planner has."""
    return QuarantinePlanner
