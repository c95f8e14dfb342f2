"""Attention of layers with normed values, and of layers that read the keys and values of an earlier layer.

Legend: T new tokens in the step (ragged, packed) · D model dim · Q query heads · H head size
Owns: how these two project.  Does not know: where keys of a layer lie in the pool, which backend attends.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.layered_shape import BorrowingShape, NormedValuesShape
from engine.checkpoints.shape import HeadNormShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear, RowLinear
from engine.layers.norm import HeadNorm
from engine.layers.rotary import Rotary
from engine.layers.self_attention import SelfAttention
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice, joined


class NormedValuesAttention(SelfAttention):
    """A ``SelfAttention`` with an RMS norm without weights over each value."""

    def __init__(
        self, shape: NormedValuesShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self._value_eps = shape.eps

    def heads(self, normed_TD: Tensor) -> Tensor:
        """Return queries, keys and normed values."""
        heads = super().heads(normed_TD)
        values = heads[:, self.num_rotated :]
        values.copy_(F.rms_norm(values, values.shape[-1:], None, self._value_eps))
        return heads


class BorrowingAttention:
    """An ``Attention`` that has queries alone: it stores nothing, and the pool has its lender's keys in its place."""

    def __init__(
        self, shape: BorrowingShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        width = shape.num_heads * shape.head_size
        self.query = ColumnLinear(hidden_size, [("q_proj", width)], shape.qkv_bias, comm, device, dtype)
        self.num_queries = shape.num_heads // comm.size
        self.num_keys = max(1, shape.num_kv_heads // comm.size)
        self.sinks_Q: Tensor | None = None
        assert isinstance(shape.head_norm, HeadNormShape), f"{shape.head_norm} is no norm of single heads"
        self.head_norm = HeadNorm(self.num_queries, 0, shape.head_size, shape.head_norm.eps, device, dtype)
        self.output_linear = RowLinear(width, hidden_size, shape.output_bias, comm, device, dtype)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the linear kernel computes (``Attention``)."""
        return self.query, self.output_linear

    def project(
        self,
        index: int,
        normed_TD: Tensor,
        rotary: Rotary | None,
        angles: tuple[Tensor, ...],
        step: StepTensors,
        kernels: LayerKernels | None,
    ) -> Tensor:
        """Return rotated queries (``Attention.project``)."""
        heads = self.query(normed_TD).view(-1, self.num_queries, self.shape.head_size)
        if kernels is None or len(angles) != 1:
            normed = self.head_norm(heads)
            return normed if rotary is None else rotary.rotate(normed, angles)
        nothing = heads.new_empty((1, 0, self.shape.head_size))  # a pool of one slot, without heads
        slots_T = torch.zeros_like(step.slots_T)
        norm = self.head_norm
        return kernels.rotate_and_store(heads, norm.weight, norm.eps, angles[0], nothing, nothing, slots_T)

    def output(self, attended_TQH: Tensor) -> Tensor:
        """Project the backend's result (``Attention.output``)."""
        return self.output_linear(attended_TQH.flatten(1))

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare the norm for the device."""
        self.head_norm.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads."""
        name = joined(prefix, self.shape.name)
        yield from self.query.slices(name)
        yield from self.head_norm.slices(name)
        yield from self.output_linear.slices(f"{name}.{self.shape.output}")
