"""The budget of prompt tokens that keeps the time between two tokens of running requests at a target.

Owns: the estimate of how long a step takes.  Does not know: requests, the planner.
"""

import math

import numpy as np

MIN_PREFILL_TOKENS = 4  # a prompt never stands still, however many rows decode
LONGER = 0.5  # of the decodes' time that prompt tokens may add where the target is out of reach
MOST_BEYOND = 16  # prompt tokens that a step may have beyond the target
ALONE = 2.0  # times a step with one decode that a step may take
FORGETTING = 0.97
ANCHOR = 0.01  # weight of the last solution, in steps


class StepBudget:
    """The number of prompt tokens that fit next to the decodes of a step without delaying them.

    seconds = base + per_decode * decodes + per_token * prompt tokens, by least squares over the steps that have run:
    machine, model and context lengths are in the coefficients.  The normal equations are kept with exponential
    forgetting and anchored to the last solution (Tikhonov), so that a long stretch of equal steps neither blows up nor
    loses coefficients that such steps do not show.
    target_s: time between two tokens of a running request."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._costs = np.zeros(3)
        self._moments = np.zeros((3, 3))
        self._sums = np.zeros(3)

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Fit the costs to a step of this size that took so long."""
        # Per 64 decodes and 1,024 tokens, so that the three numbers have the same magnitude.
        features = np.array((1.0, num_decodes / 64, num_prefill_tokens / 1024))
        self._moments = self._moments * FORGETTING + np.outer(features, features)
        self._sums = self._sums * FORGETTING + features * seconds
        anchored = self._moments + np.eye(3) * ANCHOR
        self._costs = np.maximum(np.linalg.solve(anchored, self._sums + ANCHOR * self._costs), 0.0)

    def decodes(self) -> float:
        """Return the number of decodes that fit in a step, which may take the target or twice as long as one decode."""
        base, per_decode = self._costs[0], self._costs[1] / 64
        if per_decode <= 0:
            return math.inf
        longest_s = max(self._target_s, ALONE * (base + per_decode))
        return float((longest_s - base) / per_decode)

    def prefill_tokens(self, num_decodes: int, most: int) -> int:
        """Return the number of prompt tokens, at most ``most``, for a step that has ``num_decodes`` decodes."""
        per_token = self._costs[2] / 1024
        if not num_decodes or per_token <= 0:
            return most
        decodes_s = self._costs[0] + self._costs[1] * num_decodes / 64
        beyond = min(MOST_BEYOND, int(LONGER * decodes_s / per_token))
        return min(most, max(MIN_PREFILL_TOKENS, beyond, int((self._target_s - decodes_s) / per_token)))
