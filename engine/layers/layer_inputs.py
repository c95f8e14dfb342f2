"""Inputs that each layer has of its own, from a table by token and from the embedding, and the gate that adds them.

Legend: T new tokens in the step · D model dim · L layers · P size of a layer's input
Owns: these two parts.  Does not know: layers, the residual stream.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.layered_shape import InputGateShape, LayerInputsShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear, VocabLinear
from engine.layers.mlp import activated
from engine.layers.norm import RMSNorm
from engine.layers.weights import WeightSlice, whole


class LayerInputs:
    """The inputs of all layers for a step's tokens."""

    def __init__(
        self, shape: LayerInputsShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        width = shape.num_layers * shape.size
        self._table = VocabLinear(shape.vocab_size, width, comm, device, dtype)
        self._project = ColumnLinear(hidden_size, [("", width)], False, None, device, dtype)
        self._norm = RMSNorm(shape.size, shape.eps, device, dtype)
        self._scale = hidden_size**-0.5
        self._table_scale = torch.tensor(math.sqrt(shape.size), dtype=dtype).item()

    def __call__(self, token_ids_T: Tensor, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Return [T, L, P].  x_TD: the embeddings, with what takes the place of a token's."""
        own_TLP = self._table.embed(token_ids_T, kernels).mul_(self._table_scale)
        projected_TLP = (self._project(x_TD) * self._scale).view(len(x_TD), self.shape.num_layers, -1)
        return self._norm(projected_TLP).add_(own_TLP.view_as(projected_TLP)).mul_(2.0**-0.5)

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare the norm for the device."""
        self._norm.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads, whose names are whole."""
        yield from self._table.slices(self.shape.table)
        yield from self._project.slices(self.shape.projection)
        yield whole(f"{self.shape.norm}.weight", self._norm.weight)


class InputGate:
    """The product out(activation(gate(x)) * input), whole on each rank: it is narrow."""

    def __init__(
        self, shape: InputGateShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._activation = shape.activation
        self._gate = ColumnLinear(hidden_size, [(shape.gate, shape.size)], False, None, device, dtype)
        self._out = ColumnLinear(shape.size, [(shape.out, hidden_size)], False, None, device, dtype)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the linear kernel computes (``FeedForward``)."""
        return self._gate, self._out

    def __call__(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        """Return what the norm behind it reads, [T, D]."""
        return self._out(activated(self._gate(x_TD), self._activation).mul_(input_TP))

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads."""
        yield from self._gate.slices(prefix)
        yield from self._out.slices(prefix)
