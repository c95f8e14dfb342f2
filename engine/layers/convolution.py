"""A causal convolution of each channel over a row's last few tokens, and LFM2's layer of one.

Legend: T new tokens of a step · C channels · K taps · B rows of the step · D model dim
Owns: the weights of the sum over taps.  Does not know: slots, what the channels are, what computes the sum.

A sum adds the same products in the same order wherever a prompt is cut: its bits do not depend on chunks.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.checkpoints.shape import MatrixRows, ShortConvolutionShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.recurrences import Recurrences
from engine.layers.recurrent import RecurrentPart
from engine.layers.states import StatesOfStep
from engine.layers.weights import WeightSlice, cut, joined, parameter, part_slices


class CausalConvolution:
    """The convolution y[t] = sum over k of w[k] x[t - K + 1 + k], with a bias or without, for each channel.

    Its state is [K - 1, C], the last inputs of a row.  rows: the channels over all ranks.
    weight_KC: as kernels read it."""

    def __init__(
        self, rows: Sequence[MatrixRows], taps: int, bias: bool, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._parts = [cut(one, comm) for one in rows]
        channels = sum(length for *_, length in self._parts)
        self.weight_CK = parameter(channels, taps, device=device, dtype=dtype)
        self.bias_C = parameter(channels, device=device, dtype=dtype) if bias else None
        self.weight_KC: Tensor = self.weight_CK.t()

    def __call__(
        self, x_TC: Tensor, windows_SKC: Tensor, step: StatesOfStep, recurrences: Recurrences, silu: bool = False
    ) -> Tensor:
        """Return y_TC, float32, and keep each row's last inputs.  silu: whether to return silu(y)."""
        return recurrences.convolve(x_TC, self.weight_KC, self.bias_C, windows_SKC, step, silu)

    def pack(self) -> None:
        """Lay the weight out by taps; called once, after loading."""
        self.weight_KC = self.weight_CK.t().float().contiguous()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint, which has the weight as [C, 1, K]."""
        yield from part_slices({"weight": self.weight_CK.unsqueeze(1), "bias": self.bias_C}, prefix, self._parts)


class ShortConvolution(RecurrentPart):
    """The recurrent layer of LFM2 (Liquid AI 2025): out(c * convolution(b * x)), where b, c and x are products."""

    def __init__(
        self, shape: ShortConvolutionShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.inner = ColumnLinear(hidden_size, shape.inner, shape.bias, comm, device, dtype)
        rows = [MatrixRows("conv", shape.size)]
        self.convolution = CausalConvolution(rows, shape.taps, shape.bias, comm, device, dtype)
        self.outer = RowLinear(shape.size, hidden_size, shape.bias, comm, device, dtype)

    def mix(self, inner_TI: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        """Return the gated convolution (``RecurrentPart``)."""
        (windows_SKD,) = states
        b_TD, c_TD, x_TD = inner_TI.chunk(3, -1)
        y_TD = self.convolution(b_TD * x_TD, windows_SKD, step, self.recurrences)
        return y_TD.mul_(c_TD).to(inner_TI.dtype)

    def by_rows(self) -> None:
        """Do nothing (``RowwisePart``): no operation between the products depends on other tokens of the step."""

    def pack(self, kernels: LayerKernels | None) -> None:
        """Lay the convolution out; called once, after loading."""
        super().pack(kernels)
        self.convolution.pack()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from self.inner.slices(name)
        yield from self.convolution.slices(name)
        yield from self.outer.slices(f"{name}.out_proj")
