"""The number of proposed tokens that a step should verify, from the costs of steps and the rate of right proposals.

Owns: both measurements, and the choice that follows.  Does not know: rows, tokens, proposers.
A step with n tokens of which a are expected to stay gives a / seconds(n) tokens per second.  The cost of a step is
measured between the completions of two steps, so that it includes the time lost when steps do not overlap.
"""

from collections.abc import Sequence
from typing import NamedTuple

FORGETTING = 0.95
FIRST_SLOPE = 0.04  # assumed cost of one more token, in decode steps, until it has been measured
SLOPE_WEIGHT = 4.0  # weight of that assumption, in squared tokens
OUTLIER = 1.5  # a step counts as at most so many times what was expected: the machine does other things too
MARGIN = 1.1  # the gain that speculation must promise: to begin and end it costs a step's overlap
SHORTEST_S = 1e-9  # duration of a step, whatever the clock reads
FEW_STEPS = 8.0  # weight of measured verifications up to which their cost counts as assumed
WORTHLESS = 0.05  # a proposal that is less likely to stay than this is not verified


class Chance(NamedTuple):
    """A row's proposals: ``num`` of them, each right with probability ``share`` if those before it are.

    ahead: tokens before the first of them that are not known yet."""

    share: float
    num: int
    ahead: int = 0


class HitRate:
    """The rate of a row's right proposals.  They are compared with its tokens even while no step verifies any."""

    __slots__ = ("hits", "misses")

    def __init__(self, hits: float = 0.5, misses: float = 1.5) -> None:
        """Begin with an assumption.  By default a row must first show that it can be guessed."""
        self.hits, self.misses = hits, misses

    def note(self, *, is_hit: bool) -> None:
        """Count a token for whose place one had been proposed."""
        self.hits = FORGETTING * self.hits + is_hit
        self.misses = FORGETTING * self.misses + (not is_hit)

    @property
    def share(self) -> float:
        """The share of right proposals, 0 to 1.  Recent ones count for more than old ones."""
        return self.hits / (self.hits + self.misses)


class Payoff:
    """Costs of one engine's steps, by the clock that measured them."""

    def __init__(self, *, tries_again: bool = False) -> None:
        """Know nothing yet.  tries_again: whether rows are tried now and then if speculation does not seem to pay, so
        that a cost that was overrated by some slow steps is measured again."""
        self._tries_again = tries_again
        self._decode_s: dict[int, float] = {}  # by number of rows
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._excess = [0.0, 0.0]  # seconds of the last verifications over those expected

    def note_decode(self, num_rows: int, seconds: float) -> None:
        """Note the duration of a step without proposals or prompts."""
        before = self._decode_s.get(num_rows, seconds)
        self._decode_s[num_rows] = before + (min(seconds, OUTLIER * before) - before) * (1 - FORGETTING)

    def note_verification(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Note the duration of a step without prompts, with so many tokens including proposals."""
        base_s, slope_s = self._verification(num_rows)
        expected_s = max(base_s + slope_s * num_tokens, SHORTEST_S)
        most, excess = OUTLIER, seconds / expected_s
        if self._tries_again and self._weight < FEW_STEPS:
            # The cost is only assumed yet: what both steps before took as well is no outlier.
            most = max(most, min(self._excess))
        self._excess = [self._excess[1], excess]
        seconds = expected_s * min(excess, most)
        sums = (self._weight, self._tokens, self._seconds, self._squares, self._products)
        added = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._weight, self._tokens, self._seconds, self._squares, self._products = (
            FORGETTING * before + more for before, more in zip(sums, added, strict=True)
        )

    def knows(self, num_rows: int) -> bool:
        """Return whether decode steps of about so many rows have been measured."""
        return any(num_rows <= 2 * rows and rows <= 2 * num_rows for rows in self._decode_s)

    def counts(self, chances: Sequence[Chance], num_rows: int, most: int) -> list[int]:
        """Return how many proposals of each row a step of ``num_rows`` rows should verify, ``most`` in all.

        All are 0 if that is expected to give fewer tokens per second than decoding."""
        counts = [0] * len(chances)
        plain_rate = num_rows / self._plain_s(num_rows)
        base_s, slope_s = self._verification(num_rows)
        # More tokens in a step pay if they bring more than their time would bring otherwise.
        worthless = max(WORTHLESS, slope_s * plain_rate)
        gains: list[tuple[float, int]] = []
        for index, (share, num, ahead) in enumerate(chances):
            gain = share ** (ahead + 1)
            for _ in range(num):
                if gain < worthless:
                    break
                gains.append((gain, index))
                gain *= share
        gains.sort(reverse=True)
        best, num_best, expected = MARGIN * plain_rate, 0, float(num_rows)
        for number, (gain, _) in enumerate(gains[:most], 1):
            expected += gain
            rate = expected / max(base_s + slope_s * (num_rows + number), SHORTEST_S)
            if rate > best:
                best, num_best = rate, number
        for _, index in gains[:num_best]:
            counts[index] += 1
        return counts

    def _plain_s(self, num_rows: int) -> float:
        """Return the seconds of a decode step; of the nearest number of rows if this one has not run."""
        if num_rows not in self._decode_s:
            num_rows = min(self._decode_s, key=lambda rows: (abs(rows - num_rows), rows), default=0)
        return max(self._decode_s.get(num_rows, 1.0), SHORTEST_S)

    def _verification(self, num_rows: int) -> tuple[float, float]:
        """Return the seconds of a step with proposals: without any token, and for each token.

        By least squares, with an assumed slope that counts for less the more has been measured."""
        plain_s = self._plain_s(num_rows)
        slope = FIRST_SLOPE * plain_s
        if not self._weight:
            return plain_s - slope * num_rows, slope
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares - self._weight * mean_tokens * mean_tokens
        covariance = self._products - self._weight * mean_tokens * mean_s
        slope = max(0.0, (covariance + SLOPE_WEIGHT * slope) / (max(0.0, variance) + SLOPE_WEIGHT))
        return mean_s - slope * mean_tokens, slope
