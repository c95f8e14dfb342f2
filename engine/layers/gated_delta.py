"""The gated delta net (Yang et al. 2024) as in Qwen3-Next, Qwen3.5 and OLMo hybrid: a recurrent part in place of
attention.

Legend: T new tokens of a step · C channels of the convolution · G heads with a key · H heads with a value
        K size of a key · V size of a value · I outputs of the first product · A decays of all heads
Owns: what comes before and after the recurrence.  Does not know: the recurrence's form, slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import GatedDeltaShape
from engine.layers.comm import Comm
from engine.layers.convolution import CausalConvolution
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.recurrent import RecurrentPart
from engine.layers.states import StatesOfStep
from engine.layers.weights import WeightSlice, joined, own_part, parameter, whole


class GatedDelta(RecurrentPart):
    """The gated delta rule over convolved queries, keys and values, then a norm, and a gate.

    shape: of this rank's heads.  whole: of all.  activation: of the gate.
    inner: queries, keys and values, the gate z, and the numbers b and a of each head, in this order."""

    activation = "silu"

    def __init__(
        self, shape: GatedDeltaShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.whole, self.comm = shape, comm
        self.shape = mine = shape.of_rank(comm.size)
        self.inner = ColumnLinear(hidden_size, shape.inner, False, comm, device, dtype)
        self.convolution = CausalConvolution(shape.convolved, shape.taps, False, comm, device, dtype)
        self.decay_H: Tensor = parameter(
            shape.num_heads, device=device, dtype=torch.float32
        )  # of all heads, until it is packed
        self.bias_A = parameter(*mine.bias_shape, device=device, dtype=torch.float32)
        self.norm_V = parameter(shape.value_size, device=device, dtype=torch.float32)
        self.outer = RowLinear(shape.num_heads * shape.value_size, hidden_size, False, comm, device, dtype)
        self._splits = mine.channels, *mine.gates

    def mix(self, inner_TI: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        """Return the gated and normed result of the recurrence (``RecurrentPart``)."""
        shape, (windows_SKC, matrices_SHKV) = self.shape, states
        qkv_TC, z_TI, b_TH, a_TH = inner_TI.split(self._splits, -1)
        qkv_TC = self.convolution(qkv_TC, windows_SKC, step, self.recurrences, silu=True)
        z_TI, a_TA = self._widened(z_TI, a_TH)
        of_heads = self.decay_H, self.bias_A
        o_THV = self.recurrences.delta(qkv_TC, a_TA, b_TH, *of_heads, shape.most, matrices_SHKV, step)
        return self.recurrences.gate(
            o_THV.flatten(1), z_TI, self.norm_V, shape.num_heads, shape.eps, False, self.activation
        )

    def _widened(self, z_TI: Tensor, a_TA: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gate and the decays from what the first product gives."""
        return z_TI, a_TA

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare for the device; called once, after loading: the decay is stored as the logarithm of its rate."""
        super().pack(kernels)
        self.convolution.pack()
        count = self.shape.num_heads
        self.decay_H = self.decay_H.narrow(0, self.comm.rank * count, count).exp().neg_()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from self.inner.slices(name)
        yield from self.convolution.slices(name)
        yield whole(f"{name}.A_log", self.decay_H.view(self.whole.decay_shape))
        yield own_part(f"{name}.dt_bias", self.whole.bias_shape, self.comm, self.bias_A)
        yield whole(f"{name}.{self.shape.norm}.weight", self.norm_V)
        outer, _ = self.shape.outer
        yield from self.outer.slices(f"{name}.{outer}")
