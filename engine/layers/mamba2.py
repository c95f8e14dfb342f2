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
from engine.layers.weights import WeightSlice, joined, parameter, whole


class Mamba2(RecurrentPart):
    """Linear attention with decay over convolved values, keys and queries, then a gate, and a norm.

    A token's decay and the factor of its value follow from its step size.
    inner: the gate, values, keys, queries, and step sizes, in this order."""

    def __init__(
        self, shape: Mamba2Shape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        heads, sizes = shape.num_heads, [rows.count for rows in shape.inner]
        self.inner = ColumnLinear(hidden_size, shape.inner, shape.bias, None, device, dtype)
        self.convolution = CausalConvolution(shape.channels, shape.taps, shape.conv_bias, device, dtype)
        self.decay_H, self.bias_H, self.skip_H = (
            parameter(heads, device=device, dtype=torch.float32) for _ in range(3)
        )
        self.norm_I = parameter(shape.inner_size, device=device, dtype=torch.float32) if shape.normed else None
        self.outer = RowLinear(shape.inner_size, hidden_size, shape.output_bias, comm, device, dtype)
        self._scales_O: Tensor | None = None
        if shape.scales:
            scales = [scale for scale, size in zip(shape.scales, sizes, strict=True) for _ in range(size)]
            self._scales_O = torch.tensor(scales, dtype=dtype, device=device)
        self._splits = (shape.inner_size, shape.channels, heads)

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
        o_TI = self.recurrences.gate(
            o_THV.flatten(1), z_TI, self.norm_I, shape.num_groups, shape.eps, shape.gated_first
        )
        return o_TI if shape.output_scale == 1.0 else o_TI * shape.output_scale

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare for the device; called once, after loading: the decay is stored as the logarithm of its rate."""
        super().pack(kernels)
        self.convolution.pack()
        self.decay_H.exp_().neg_()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads."""
        name = joined(prefix, self.shape.name)
        yield from self.inner.slices(name)
        yield from self.convolution.slices(f"{name}.conv1d")
        yield whole(f"{name}.A_log", self.decay_H)
        yield whole(f"{name}.dt_bias", self.bias_H)
        yield whole(f"{name}.D", self.skip_H)
        if self.norm_I is not None:
            yield whole(f"{name}.norm.weight", self.norm_I)
        yield from self.outer.slices(f"{name}.out_proj")
