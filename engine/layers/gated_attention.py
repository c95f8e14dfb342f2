"""Self-attention with a gate on its result (Qiu et al. 2025), as Qwen3-Next has it.

Legend: T new tokens in the step · D model dim · Q query heads · H head size
Owns: the gate.  Does not know: which backend attends.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import GatedAttentionShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear
from engine.layers.mlp import activated, activated_by_rows
from engine.layers.self_attention import SelfAttention
from engine.layers.weights import WeightSlice, joined


class GatedAttention(SelfAttention):
    """An ``Attention`` whose result is multiplied by sigmoid(gate(x))."""

    def __init__(
        self, shape: GatedAttentionShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self.gate = ColumnLinear(hidden_size, [shape.gate], shape.qkv_bias, comm, device, dtype)
        self._activate = activated

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.gate, self.output_linear

    def gated(self, attended_TQH: Tensor, normed_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Return the backend's result times the gate of the part's input."""
        if kernels is not None and kernels.on_cpu and kernels.recurrences is not None:
            attended_TI, gate_TI = attended_TQH.flatten(1).contiguous(), self.gate(normed_TD)
            return kernels.recurrences.gate(attended_TI, gate_TI, None, 1, 0.0, False, "sigmoid").view_as(attended_TQH)
        return attended_TQH * self._activate(self.gate(normed_TD), "sigmoid").view_as(attended_TQH)

    def by_rows(self) -> None:
        """Compute the gate by rows (``RowwisePart``)."""
        self._activate = activated_by_rows

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().slices(prefix)
        yield from self.gate.slices(joined(prefix, self.shape.name))
