"""The adaptive step budget: how many prompt tokens fit beside the decodes without keeping those waiting.

Owns: a model of how long a step takes, learnt from the steps that have run.  Does not know: what is in them, clocks.
seconds = base + per_decode * decodes + per_token * prompt tokens, by least squares over recent steps: machine, model
and context lengths are in the coefficients.  The normal equations are kept with exponential forgetting and anchored to
the last solution (Tikhonov), so that a long stretch of equal steps neither blows up nor forgets what they do not show.
"""

import numpy as np

MIN_PREFILL_TOKENS = 16  # a prompt never stands still, however many decode
FORGETTING = 0.97
ANCHOR = 0.01  # weight of the last solution, in steps


class StepBudget:
    """Prompt tokens per step.  target_s: time between two tokens of a running request; 0 for no target."""

    def __init__(self, max_step_tokens: int, target_s: float) -> None:
        self._max_step_tokens = max_step_tokens
        self._target_s = target_s
        self._costs = np.zeros(3)
        self._moments = np.zeros((3, 3))
        self._sums = np.zeros(3)

    @property
    def learns(self) -> bool:
        """Whether ``observe`` is of any use."""
        return self._target_s > 0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step of this size took so long."""
        # Per 64 decodes and 1,024 tokens, so that the three numbers are of one magnitude.
        features = np.array((1.0, num_decodes / 64, num_prefill_tokens / 1024))
        self._moments = self._moments * FORGETTING + np.outer(features, features)
        self._sums = self._sums * FORGETTING + features * seconds
        anchored = self._moments + np.eye(3) * ANCHOR
        self._costs = np.maximum(np.linalg.solve(anchored, self._sums + ANCHOR * self._costs), 0.0)

    def prefill_tokens(self, num_decodes: int) -> int:
        """Prompt tokens that the next step may hold beside ``num_decodes``."""
        most = self._max_step_tokens - num_decodes
        per_token = self._costs[2] / 1024
        if not self._target_s or not num_decodes or per_token <= 0:
            return most
        left_s = self._target_s - self._costs[0] - self._costs[1] * num_decodes / 64
        return min(most, max(MIN_PREFILL_TOKENS, int(left_s / per_token)))
