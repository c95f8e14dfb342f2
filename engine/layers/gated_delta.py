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
from engine.layers.weights import WeightSlice, joined, parameter, whole


class GatedDelta(RecurrentPart):
    """The gated delta rule over convolved queries, keys and values, then a norm, and a gate.

    inner: queries, keys and values, the gate z, and the numbers b and a of each head, in this order.
    names: of the norm and of the second product.  activation: of the gate."""

    activation = "silu"

    def __init__(
        self, shape: GatedDeltaShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        heads, values = shape.num_heads, shape.num_heads * shape.value_size
        keys = shape.num_keys * shape.key_size
        self._sides = {"q": keys, "k": keys, "v": values}
        qkv = [("in_proj_qkv", shape.channels)]
        self.names = "norm", "out_proj"
        if shape.layout == "apart":
            qkv = [(f"{side}_proj", size) for side, size in self._sides.items()]
            self.names = "o_norm", "o_proj"
        gates = self._gates()
        self.inner = ColumnLinear(hidden_size, [*qkv, *gates.items()], False, None, device, dtype)
        self.convolution = CausalConvolution(shape.channels, shape.taps, False, device, dtype)
        self.decay_H = parameter(heads, device=device, dtype=torch.float32)
        self.bias_A = parameter(heads, device=device, dtype=torch.float32)
        self.norm_V = parameter(shape.value_size, device=device, dtype=torch.float32)
        self.outer = RowLinear(values, hidden_size, False, comm, device, dtype)
        self._splits = [shape.channels, *gates.values()]

    def _gates(self) -> dict[str, int]:
        """Return the names and sizes of what the first product gives behind queries, keys and values: z, b and a."""
        heads = self.shape.num_heads
        names = (
            ("g_proj", "b_proj", "a_proj") if self.shape.layout == "apart" else ("in_proj_z", "in_proj_b", "in_proj_a")
        )
        return dict(zip(names, (heads * self.shape.value_size, heads, heads), strict=True))

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
        self.decay_H.exp_().neg_()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads."""
        name = joined(prefix, self.shape.name)
        inner = self.inner.slices(name)
        yield from self._grouped(name) if self.shape.layout == "grouped" else inner
        if self.shape.layout == "apart":
            yield from self.convolution.apart(name, self._sides)
        else:
            yield from self.convolution.slices(f"{name}.conv1d")
        yield whole(f"{name}.A_log", self.decay_H.view(self.shape.decay_shape))
        yield whole(f"{name}.dt_bias", self.bias_A)
        norm, outer = self.names
        yield whole(f"{name}.{norm}.weight", self.norm_V)
        yield from self.outer.slices(f"{name}.{outer}")

    def _grouped(self, name: str) -> Iterator[WeightSlice]:
        """Yield the slices of a checkpoint that has, for each head with a key, its rows one after the other."""
        shape, shared = self.shape, self.shape.num_heads // self.shape.num_keys
        values = shared * shape.value_size
        qkv, z, b, a = self.inner.weight.split(self._splits)
        q, k, v = qkv.split([*self._sides.values()])
        tensors = {
            "in_proj_qkvz": [(q, shape.key_size), (k, shape.key_size), (v, values), (z, values)],
            "in_proj_ba": [(b, shared), (a, shared)],
        }
        for tensor, sides in tensors.items():
            rows, start = sum(len(side) for side, _ in sides), 0
            for head in range(shape.num_keys):
                for side, size in sides:
                    target = side[head * size : (head + 1) * size]
                    yield WeightSlice(f"{name}.{tensor}.weight", (rows, side.shape[1]), 0, start, size, target)
                    start += size
