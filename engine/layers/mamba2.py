"""Mamba 2 (Dao and Gu 2024): a recurrent part in place of attention, or beside it.

Legend: T new tokens of a step · C channels of the convolution · G groups · H heads · I values of all heads
        K size of a key · V size of a value · O outputs of the first product
Owns: what comes before and after the recurrence.  Does not know: the recurrence's form, slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import Mamba2Shape
from engine.layers.comm import Comm
from engine.layers.convolution import CausalConvolution
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.recurrent import RecurrentPart
from engine.layers.states import StatesOfStep
from engine.layers.weights import WeightSlice, joined, own_part, parameter


class Mamba2(RecurrentPart):
    """Linear attention with decay over convolved values, keys and queries, then a gate, and a norm.

    A token's decay and the factor of its value follow from its step size.
    shape: of this rank's heads.  whole: of all.
    inner: the gate, values, keys, queries, and step sizes, in this order."""

    def __init__(
        self, shape: Mamba2Shape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.whole, self.comm = shape, comm
        self.shape = mine = shape.of_rank(comm.size)
        heads, sizes = mine.num_heads, [rows.count for rows in mine.inner]
        self.inner = ColumnLinear(hidden_size, shape.inner, shape.bias, comm, device, dtype)
        self.convolution = CausalConvolution(shape.convolved, shape.taps, shape.conv_bias, comm, device, dtype)
        self.decay_H, self.bias_H, self.skip_H = (
            parameter(heads, device=device, dtype=torch.float32) for _ in range(3)
        )
        self._norms_all = shape.normed and shape.num_groups < comm.size
        normed = shape.inner_size if self._norms_all else mine.inner_size
        self.norm_I = parameter(normed, device=device, dtype=torch.float32) if shape.normed else None
        self.outer = RowLinear(shape.inner_size, hidden_size, shape.output_bias, comm, device, dtype)
        self._scales_O: Tensor | None = None
        if shape.scales:
            scales = [scale for scale, size in zip(shape.scales, sizes, strict=True) for _ in range(size)]
            self._scales_O = torch.tensor(scales, dtype=dtype, device=device)
        self._splits = (mine.inner_size, mine.channels, heads)

    def mix(self, inner_TO: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        """Return the gated and normed result of the recurrence (``RecurrentPart``)."""
        shape, (windows_SKC, matrices_SHKV) = self.shape, states
        if self._scales_O is not None:
            inner_TO = inner_TO * self._scales_O
        z_TI, channels_TC, step_TH = inner_TO.split(self._splits, -1)
        channels_TC = self.convolution(channels_TC, windows_SKC, step, self.recurrences, silu=True)
        o_THV = self.recurrences.ssd(
            channels_TC, step_TH, self.decay_H, self.bias_H, self.skip_H, shape.least_step, matrices_SHKV, step
        )
        o_TI = self._gated(o_THV.flatten(1), z_TI)
        return o_TI if shape.output_scale == 1.0 else o_TI * shape.output_scale

    def _gated(self, o_TI: Tensor, z_TI: Tensor) -> Tensor:
        """Return the gated and normed result of this rank's heads.  A group of the norm may have those of others."""
        shape = self.whole if self._norms_all else self.shape
        if self._norms_all:
            o_TI, z_TI = self.comm.all_gather(o_TI), self.comm.all_gather(z_TI.contiguous())
        o_TI = self.recurrences.gate(o_TI, z_TI, self.norm_I, shape.num_groups, shape.eps, shape.gated_first)
        return o_TI.tensor_split(self.comm.size, 1)[self.comm.rank] if self._norms_all else o_TI

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare for the device; called once, after loading: the decay is stored as the logarithm of its rate."""
        super().pack(kernels)
        self.convolution.pack()
        self.decay_H.exp_().neg_()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from self.inner.slices(name)
        yield from self.convolution.slices(name)
        for kind, target in (("A_log", self.decay_H), ("dt_bias", self.bias_H), ("D", self.skip_H)):
            yield own_part(f"{name}.{kind}", (self.whole.num_heads,), self.comm, target)
        if self.norm_I is not None:
            yield own_part(f"{name}.norm.weight", (self.whole.inner_size,), self.comm, self.norm_I)
        yield from self.outer.slices(f"{name}.out_proj")
