"""Captured decode steps that also run steps of which only the device knows the rows' lengths.

Owns: the positions of such a step, which are distances from the lengths.  Does not know: how lengths are counted.
"""

import numpy as np
import numpy.typing as npt
from msgspec import structs

from engine.execution.batch import Int32
from engine.execution.captured_steps import Decoded
from engine.graphs.decode import DecodeGraphs
from engine.layers.step import BEHIND
from engine.messages import Step
from engine.sampling.captured import SamplingVariant


class CountedDecodes:
    """Captured decodes around others.  counted: rows of the step that follows whose lengths the device counts."""

    def __init__(self, whole: DecodeGraphs) -> None:
        self._whole = whole
        self.counted: Int32 | None = None
        self._is_counted = False

    @property
    def verifies(self) -> bool:
        """Whether steps may have rows with several tokens."""
        return self._whole.verifies

    @property
    def most_places(self) -> int:
        """The most tokens of a step."""
        return max(self._whole.captured, default=0)

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a graph for so many tokens."""
        return self._whole.fits(num_rows)

    def variant_of(self, rows_N: npt.NDArray[np.int64], positions_N: npt.NDArray[np.int64]) -> SamplingVariant:
        """Return how a step of these rows will be sampled, which must not need true positions on the host."""
        variant = self._whole.variant_of(rows_N, positions_N)
        assert not (self._is_counted and variant is SamplingVariant.LOGITS), "the host samples and knows no positions"
        return variant

    def apply(self, step: Step) -> None:
        """Take in the changes since the last step."""
        counted, self.counted = self.counted, None
        self._is_counted = counted is not None
        if counted is not None and step.prefill_rows:
            rows, starts = (np.frombuffer(one, dtype=np.int32) for one in (step.prefill_rows, step.prefill_starts))
            starts = np.where(np.isin(rows, counted), BEHIND, starts).astype(np.int32)
            step = structs.replace(step, prefill_starts=starts.tobytes())
        self._whole.apply(step)

    def launch(
        self, rows_N: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int32], variant: SamplingVariant
    ) -> Decoded:
        """Queue the step that ``apply`` was last called with."""
        return self._whole.launch(rows_N, lengths_N, variant)
