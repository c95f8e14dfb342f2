"""The attention part of a layer, in two halves around the attention call, so that a graph can capture each.

Legend: T new tokens in the step (ragged, packed) · D model dim · A query and key heads · Q query heads
        G key/value heads (of this rank) · H head size
Owns: projections, the norm of heads, rotation, storing keys and values.
Does not know: which backend attends, the residual stream, which model it is in.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import (
    AttentionShape,
    HeadLayerNormShape,
    HeadLengthShape,
    HeadNormShape,
    WideHeadNormShape,
)
from engine.layers.comm import Comm, NormingComm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear, QKVLinear, RowLinear
from engine.layers.norm import HeadLayerNorm, HeadLength, HeadNorm, WideHeadNorm
from engine.layers.rotary import Rotary
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice, joined, parameter, transposed


class SelfAttention:
    """An ``Attention`` with grouped queries over keys and values."""

    def __init__(
        self, shape: AttentionShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        inputs, heads = shape.input_size or hidden_size, (shape.num_heads, shape.num_kv_heads, shape.head_size)
        self.qkv = QKVLinear(inputs, shape.inner, *heads, shape.qkv_bias, comm, device, dtype)
        self.num_queries, self.num_keys = self.qkv.num_heads, self.qkv.num_kv_heads
        self.num_rotated = self.num_queries + self.num_keys
        self.head_shape = (self.num_rotated + self.num_keys, shape.head_size)
        self.head_norm = self._head_norm(shape, comm, device, dtype)
        self.output_linear = RowLinear(
            shape.num_heads * shape.head_size, hidden_size, shape.output_bias, comm, device, dtype
        )
        self.sinks_Q: Tensor | None = None
        if shape.sinks:
            self.sinks_Q = parameter(self.num_queries, device=device, dtype=dtype)
        self.first_query = comm.rank * self.num_queries

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the linear kernel computes (``Attention``)."""
        return self.qkv, self.output_linear

    def _head_norm(
        self, shape: AttentionShape, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> HeadNorm | WideHeadNorm | None:
        counts, totals = (self.num_queries, self.num_keys), (shape.num_heads, shape.num_kv_heads)
        size = shape.head_size
        match shape.head_norm:
            case HeadNormShape(eps=eps, offset=offset, query=query, key=key):
                return HeadNorm(*counts, size, eps, device, dtype, offset=offset, names=(query, key))
            case HeadLengthShape(eps=eps):
                return HeadLength(*counts, size, eps, device, dtype)
            case HeadLayerNormShape(eps=eps):
                return HeadLayerNorm(counts, totals, size, eps, comm, device, dtype)
            case WideHeadNormShape(eps=eps):
                return WideHeadNorm(counts, totals, size, eps, comm, device, dtype)
            case None:
                return None

    def project(
        self,
        index: int,
        normed_TD: Tensor,
        rotary: Rotary | None,
        angles: tuple[Tensor, ...],
        step: StepTensors,
        kernels: LayerKernels | None,
    ) -> Tensor:
        """Return rotated queries and store keys and values (``Attention.project``).  Norms come before rotation."""
        heads = self.heads(normed_TD)
        norm = self.head_norm
        if isinstance(norm, WideHeadNorm):
            heads[:, : self.num_rotated] = norm(heads[:, : self.num_rotated])
            norm = None
        if kernels is not None and self._in_kernels(rotary, kernels) and not step.pool.format.scaled:
            (table_TH,) = angles or (normed_TD.new_empty((len(normed_TD), 0)),)
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            keys, values = step.pool.keys(index), step.pool.values(index)
            limit = step.pool.format.limit
            return kernels.rotate_and_store(heads, weight, eps, table_TH, keys, values, step.slots_T, limit)
        qk_TAH, v_TGH = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if norm is not None:
            qk_TAH = norm(qk_TAH)
        if rotary is not None:
            qk_TAH = rotary.rotate(qk_TAH, angles)
        step.pool.store(index, qk_TAH[:, self.num_queries :], v_TGH, step.slots_T)
        return qk_TAH[:, : self.num_queries]

    def heads(self, normed_TD: Tensor) -> Tensor:
        """Return queries, keys and values, [T, Q + 2 G, H], before norm and rotation."""
        return self.qkv(normed_TD).view(-1, *self.head_shape)

    def _in_kernels(self, rotary: Rotary | None, kernels: LayerKernels) -> bool:
        return kernels.on_cpu if rotary is None else rotary.fits(kernels)

    def output(self, attended_TQH: Tensor) -> Tensor:
        """Project the backend's result (``Attention.output``)."""
        return self.output_linear(attended_TQH.flatten(1))

    def leave_sum(self) -> NormingComm | None:
        return self.output_linear.leave_sum()

    def pack(self, kernels: LayerKernels | None) -> None:
        if self.head_norm is not None:
            self.head_norm.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        shape, name = self.shape, joined(prefix, self.shape.name)
        qkv = self.qkv.slices(name)
        output = self.output_linear.slices(f"{name}.{shape.output}")
        yield from transposed(qkv) if shape.transposed else qkv
        if self.head_norm is not None:
            yield from self.head_norm.slices(name)
        yield from transposed(output) if shape.transposed else output
        if self.sinks_Q is not None:
            yield WeightSlice(f"{name}.sinks", (shape.num_heads,), 0, self.first_query, self.num_queries, self.sinks_Q)
