"""The target for the time between two tokens in the planner: it limits the prompt tokens of steps with decodes.

Owns: the budget of one planner.  Does not know: which prompts get the tokens.
"""

from engine.features.itl_target.budget import StepBudget
from engine.plugins.features import FeatureContext
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import PlannerLimits
from engine.scheduling.step_builder import InFlight


class TargetPlanner(PlannerFeature):
    """The target of one planner, ``limits.itl_target_s``.  It is off while that is 0."""

    def __init__(self, parts: PlannerParts) -> None:
        self._requests = parts.requests
        self.retuned(parts.limits)

    def retuned(self, limits: PlannerLimits) -> None:
        """Begin to measure steps for the new target."""
        self.is_on = limits.itl_target_s > 0
        self._budget = StepBudget(limits.itl_target_s)

    def prefill_tokens(self, num_decodes: int, most: int) -> int:
        return self._budget.prefill_tokens(num_decodes, most)

    def completed(self, record: InFlight, seconds: float) -> None:
        """Fit the budget to the duration of a step, from the moment when the device was free for it."""
        seconds = min(seconds, self._requests.meter.last_completed_at - record.launched_at)
        num_decodes = record.num_decodes + record.num_extra_tokens
        self._budget.observe(num_decodes, record.num_prefill_tokens, seconds)


def planner_feature(context: FeatureContext) -> NewFeature:
    """Return the builder of the feature, which a change of settings may switch on."""
    return TargetPlanner
