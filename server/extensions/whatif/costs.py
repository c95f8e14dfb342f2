"""The time that a step takes by what it has to compute, learnt from steps that were measured.

Owns: the terms of a step's cost, the fit, how well it explains what was measured.  Does not know: planning, files.

seconds = sum of coefficient x term, none below 0.  The terms are a constant, the quantities of ``StepSize``, and the
tokens of a step up to a few bounds, since a product with few rows takes as long for one more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.features.traffic.sizes import StepSize
from engine.features.traffic.trace import TracedStep

Floats = npt.NDArray[np.float64]

BOUNDS = (8, 32, 128)
ROUNDS = 20  # of reweighting
OUTLIER = 2.0  # residuals beyond so many times the median one count less, by Huber's weights
LEAST = 0.1  # of the median duration; no step is expected to take less when errors are weighed
NUM_BINS = 8
MIN_PER_BIN = 30
BEYOND = 1.25  # times the largest that was measured


@dataclass(frozen=True, slots=True)
class Fit:
    """The quality of the fit to the steps that the model was learnt from.

    r2: share of the variance of durations.  median_error: of a step, relative.  total_error: of all together."""

    num_steps: int
    r2: float
    median_error: float
    total_error: float


class StepCosts:
    """Durations of steps.  largest: of each quantity, in a step that was measured."""

    def __init__(self, steps: Sequence[TracedStep]) -> None:
        sizes = np.array([one.size for one in steps], dtype=np.float64)
        seconds = np.array([one.seconds for one in steps])
        self.largest = StepSize(*sizes.max(axis=0).astype(int).tolist())
        terms = _terms(sizes)
        self._coefficients = _robust(terms, seconds)
        predicted = terms @ self._coefficients
        self._edges, self._factors = _corrections(predicted, seconds)
        corrected = predicted * self._factors[np.searchsorted(self._edges, predicted)]
        error = np.abs(corrected - seconds)
        variance = float(((seconds - seconds.mean()) ** 2).sum())
        self.fit = Fit(
            num_steps=len(steps),
            r2=1.0 - float((error**2).sum()) / variance if variance else 1.0,
            median_error=float(np.median(error / np.maximum(seconds, 1e-9))),
            total_error=float(corrected.sum() / seconds.sum() - 1.0),
        )

    def seconds(self, size: StepSize) -> float:
        """Returns how long a step of this size takes, on average."""
        predicted = float((_terms(np.array([size], dtype=np.float64)) @ self._coefficients)[0])
        return predicted * float(self._factors[np.searchsorted(self._edges, predicted)])


def _terms(sizes: Floats) -> Floats:
    tokens = sizes[:, 0] + sizes[:, 3]
    bounded = [np.minimum(tokens, bound) for bound in BOUNDS]
    return np.column_stack((np.ones(len(sizes)), sizes, *bounded))


def _robust(terms: Floats, seconds: Floats) -> Floats:
    """Least squares of errors relative to the fit, in which steps that something else has held up count little."""
    scale = np.maximum(terms.max(axis=0), 1e-9)
    weights, coefficients = np.ones(len(seconds)), np.zeros(terms.shape[1])
    least = max(float(np.median(seconds)) * LEAST, 1e-7)
    expected = np.full(len(seconds), float(seconds.mean()) + least)
    for _ in range(ROUNDS):
        rows = np.sqrt(weights) / expected
        coefficients = nonnegative(terms / scale * rows[:, None], seconds * rows) / scale
        # By what is expected, not by what was measured: short measurements would count for too much.
        expected = np.maximum(terms @ coefficients, least)
        residuals = np.abs(expected - seconds) / expected
        usual = OUTLIER * max(float(np.median(residuals)), 1e-6)
        weights = np.minimum(1.0, usual / np.maximum(residuals, 1e-12))
    return coefficients


def _corrections(predicted: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Returns what to multiply predictions by, between edges, so that steps of each length last as long as they did
    together.

    What holds a step up now and then, and what no term explains, is on average in here."""
    num_bins = int(np.clip(len(seconds) // MIN_PER_BIN, 1, NUM_BINS))
    edges = np.unique(np.quantile(predicted, np.arange(1, num_bins) / num_bins))
    bins = np.searchsorted(edges, predicted)
    sums = np.bincount(bins, weights=predicted, minlength=len(edges) + 1)
    totals = np.bincount(bins, weights=seconds, minlength=len(edges) + 1)
    return edges, np.where(sums > 0, totals / np.where(sums > 0, sums, 1.0), 1.0)


def nonnegative(a: Floats, b: Floats) -> Floats:
    """The x >= 0 for which |a x - b| is least, by the active sets of Lawson and Hanson (1974)."""
    gram, target = a.T @ a, a.T @ b
    count = len(target)
    x, active = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(target).max()))
    for _ in range(10 * count):
        gradient = np.where(active, -np.inf, target - gram @ x)
        if gradient.max() <= tolerance:
            break
        active[int(gradient.argmax())] = True
        while True:
            solved = np.zeros(count)
            solved[active] = np.linalg.lstsq(gram[np.ix_(active, active)], target[active], rcond=None)[0]
            negative = active & (solved <= 0)
            if not negative.any():
                x = solved
                break
            step = float((x[negative] / (x[negative] - solved[negative] + 1e-300)).min())
            x = x + step * (solved - x)
            active &= x > 1e-14
            x[~active] = 0.0
    return x
