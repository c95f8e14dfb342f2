"""The feed-forward part of a layer: two products with an activation, or a gate, between them.

Legend: T new tokens in the step · D model dim
Owns: the order of operations.  Does not know: which model it is in, files.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import GatedShape, MLPShape
from engine.layers.activation import activated, gated
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.weights import WeightSlice, joined, merged, transposed


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, shape: GatedShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        parts = [("gate_proj", shape.intermediate_size), ("up_proj", shape.intermediate_size)]
        self.gate_up = ColumnLinear(hidden_size, parts, shape.bias, comm, device, dtype)
        self.down = RowLinear(shape.intermediate_size, hidden_size, shape.bias, comm, device, dtype)
        self.linears = (self.gate_up, self.down)

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        return self.down(gated(self.gate_up(x_TD), self.shape.activation, kernels))

    def pack(self, kernels: LayerKernels | None) -> None:
        """Nothing to prepare beside the linear layers."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this part reads from a checkpoint."""
        name = joined(prefix, self.shape.name)
        gate_up = self.gate_up.slices(name)
        yield from merged(gate_up, f"{name}.{self.shape.merged}") if self.shape.merged else gate_up
        yield from self.down.slices(f"{name}.down_proj")


class MLP:
    """down(activation(up(x)))."""

    def __init__(self, shape: MLPShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.up = ColumnLinear(hidden_size, [(shape.up, shape.intermediate_size)], shape.bias, comm, device, dtype)
        self.down = RowLinear(shape.intermediate_size, hidden_size, shape.bias, comm, device, dtype)
        self.linears = (self.up, self.down)

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        return self.down(activated(self.up(x_TD), self.shape.activation))

    def pack(self, kernels: LayerKernels | None) -> None:
        """Nothing to prepare beside the linear layers."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this part reads from a checkpoint."""
        name = joined(prefix, self.shape.name)
        for linear, source in ((self.up, name), (self.down, f"{name}.{self.shape.down}")):
            slices = linear.slices(source)
            yield from transposed(slices) if self.shape.transposed else slices
