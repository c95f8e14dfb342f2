"""The target for the time between two tokens in the planner: it limits the prompt tokens of steps, and their decodes.

Owns: the budget and the turns of one planner.  Does not know: which prompts get the tokens.
"""

from engine.features.itl_target.budget import StepBudget
from engine.features.itl_target.turns import RowTurns
from engine.plugins.features import FeatureContext
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import PlannerLimits, Sequence
from engine.scheduling.step_builder import InFlight, StepBuilder


class TargetPlanner(PlannerFeature):
    """The target of one planner, ``limits.itl_target_s``.  It is off while that is 0."""

    def __init__(self, parts: PlannerParts) -> None:
        self._requests = parts.requests
        self._turns = RowTurns(parts.table, parts.decodes, StepBudget(parts.limits.itl_target_s))
        self.retuned(parts.limits)

    def retuned(self, limits: PlannerLimits) -> None:
        """Begin to measure steps for the new target."""
        self.is_on = limits.itl_target_s > 0
        self._budget = StepBudget(limits.itl_target_s)
        self._turns.end()
        self._turns.budget = self._budget

    def prefill_tokens(self, num_decodes: int, most: int) -> int:
        return self._budget.prefill_tokens(num_decodes, most)

    def started(self, sequence: Sequence) -> None:
        self._turns.started(sequence.tenant)

    def attach(self, step: StepBuilder) -> None:
        """Choose the rows of the next step, if this one has ended prompts."""
        self._turns.planned()

    def completed(self, record: InFlight, seconds: float) -> None:
        """Fit the budget to the duration of a step, from the moment when the device was free for it."""
        seconds = min(seconds, self._requests.meter.last_completed_at - record.launched_at)
        num_decodes = record.num_decodes + record.num_extra_tokens
        self._budget.observe(num_decodes, record.num_prefill_tokens, seconds)
        self._turns.completed()

    def left(self, row: int) -> None:
        """Give the place of a row to another one."""
        self._turns.left(row)

    def reset(self) -> list[Sequence]:
        """Forget all rows."""
        self._turns.clear()
        return []


def planner_feature(context: FeatureContext) -> NewFeature:
    """Return the builder of the feature, which a change of settings may switch on."""
    return TargetPlanner
