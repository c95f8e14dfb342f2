"""The results of several ranks for one step.

Owns: answers of ranks that are ahead of others.  Does not know: the planner, what a token means.
"""

from collections import deque

from engine.messages import StepDone


class RanksDiverged(RuntimeError):
    """Two ranks have sampled different tokens from logits that should be equal."""


class RankResults:
    """Results of ranks that are ahead of others: a step is done when every rank has answered, and all must agree.

    Each rank answers its steps in order; rank 0's answer is used, since it has the details."""

    def __init__(self, num_ranks: int) -> None:
        self._waiting: list[deque[StepDone]] = [deque() for _ in range(num_ranks)]

    def add(self, result: StepDone) -> StepDone | None:
        """Add one rank's result.  Returns the step's result once complete.  Raises RanksDiverged if ranks disagree."""
        self._waiting[result.rank].append(result)
        if not all(self._waiting):
            return None
        first, *others = (results.popleft() for results in self._waiting)
        for other in others:
            if (other.step_id, other.token_ids) != (first.step_id, first.token_ids):
                raise RanksDiverged(
                    f"step {first.step_id}: rank {other.rank} sampled other tokens than rank {first.rank} "
                    f"(its answer is to step {other.step_id}); the ranks no longer compute the same"
                )
        return first

    def clear(self) -> None:
        """Drop the answers of ranks that are gone."""
        for results in self._waiting:
            results.clear()
