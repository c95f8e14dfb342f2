"""The ranks' results of a step: it is done when every rank says so, and they must agree.

Owns: results of ranks that are ahead of others.  Does not know: what a step computed, when to send the next one.
"""

from collections import deque

from engine.messages import StepDone


class RanksDiverged(RuntimeError):
    """Two ranks have sampled different tokens from what should be the same logits."""


class RankResults:
    """Each rank answers its steps in order; rank 0's answer, which has the details, stands for all."""

    def __init__(self, num_ranks: int) -> None:
        self._waiting: list[deque[StepDone]] = [deque() for _ in range(num_ranks)]

    def add(self, result: StepDone) -> StepDone | None:
        """Take one rank's result.  Returns the step's once it is complete; raises RanksDiverged if ranks disagree."""
        if len(self._waiting) == 1:
            return result
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
        """The ranks are gone; so are their answers."""
        for results in self._waiting:
            results.clear()
