"""Kimi delta attention (Moonshot AI 2025) of Kimi-Linear: the gated delta rule with a decay for each number of a key.

Legend: T new tokens of a step · H heads · A decays, one for each number of each head's key · I values of all heads
Owns: the two products from which decays and gates come.  Does not know: the recurrence's form, slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import KimiDeltaShape
from engine.layers.comm import Comm
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import ColumnLinear, Linear
from engine.layers.weights import WeightSlice, joined


class KimiDelta(GatedDelta):
    """A gated delta net whose gate, a sigmoid, and decays each pass through a few numbers between two products."""

    shape: KimiDeltaShape
    activation = "sigmoid"

    def __init__(
        self, shape: KimiDeltaShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self.gate, self.decay = (
            ColumnLinear(inputs, [rows], False, comm, device, dtype) for inputs, rows in shape.between
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inner, self.gate, self.decay, self.outer

    def _widened(self, z_TI: Tensor, a_TA: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(z_TI.contiguous()), self.decay(a_TA.contiguous())

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from super().slices(prefix)
        yield from self.gate.slices(name)
        yield from self.decay.slices(name)
