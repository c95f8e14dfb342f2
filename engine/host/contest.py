"""A contest: candidates are measured in turns, and what is hopeless is left out of the next turn.

Owns: the order of measurements, when they end.  Does not know: what a candidate is, how one is timed, which is taken.
Something else that runs on the machine for a while slows all candidates of a turn, and not one of them.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Candidate = TypeVar("Candidate")
Case = TypeVar("Case")


class Contest(Generic[Candidate, Case]):
    """Measures candidates in some cases.

    seconds: times a candidate in a case.
    turns: most measurements of each.
    middle: one time of a candidate in a case, from those of all turns.
    hopeless: a candidate that takes so many times as long as the best is not measured again.  In the first turn the
        candidates after it are not measured at all: they come in an order in which they would be no faster.
    is_over: asked after every turn."""

    def __init__(
        self,
        seconds: Callable[[Candidate, Case], float],
        cases: Sequence[Case],
        *,
        turns: int,
        middle: Callable[[Iterable[float]], float] = min,
        hopeless: float = math.inf,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._seconds = seconds
        self._cases = cases
        self._turns = turns
        self._middle = middle
        self._hopeless = hopeless
        self._is_over = is_over

    def run(self, candidates: Iterable[Candidate]) -> dict[Candidate, list[float]]:
        """Return the times of each candidate that was measured, in the order of the cases."""
        left = list(candidates)
        samples: dict[Candidate, list[list[float]]] = {}
        times: dict[Candidate, list[float]] = {}
        for turn in range(self._turns):
            for one in left:
                samples.setdefault(one, []).append([self._seconds(one, case) for case in self._cases])
                times[one] = [self._middle(of_case) for of_case in zip(*samples[one], strict=True)]
                if not turn and times[one][0] > self._hopeless * min(of_cases[0] for of_cases in times.values()):
                    break
            left = self._promising(times)
            if self._is_over() or len(left) == 1:
                break
        return times

    def _promising(self, times: dict[Candidate, list[float]]) -> list[Candidate]:
        if math.isinf(self._hopeless):
            return list(times)
        means = {one: statistics.geometric_mean(of_cases) for one, of_cases in times.items()}
        return [one for one, mean in means.items() if mean <= self._hopeless * min(means.values())]
