"""Products of float32 inputs with weights kept as float16 in FBGEMM's layout: half the memory to read.

Legend: T rows of the input · I input features · O output features
A bfloat16 has fewer digits than a float16, so the weights of such a checkpoint lose nothing but digits of the tiniest
elements, less than a float32 product rounds by.  A weight that would lose more is packed by oneDNN instead, unless
float16 was asked for.
"""

import torch
from torch import Tensor

from engine.layers.packing import PackedWeight
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.linear import onednn
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "checkpoint_dtypes": ["bfloat16", "float16"],
    "quantizations": ["none", "float16"],
    "instruction_sets": ["avx2"],
}
# Of a weight's norm: half of what float32 rounds each element by.
EXACT = 2.0**-25


class HalfWeight:
    """W[O, I] as float16; sums are in float32."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
        self.nbytes = weight_OI.numel() * torch.float16.itemsize

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        y_TO: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_TI.contiguous(), self._packed)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class Fp16:
    """exact: whether weights that float16 would round are left to oneDNN."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.element_bytes = (torch.float32 if exact else torch.float16).itemsize  # at most

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """See ``LinearKernel.pack``.  Values beyond float16's range are left to oneDNN in any case."""
        rounded_OI = weight_OI.half()
        lost = torch.sub(rounded_OI, weight_OI).norm()  # in float32; infinite beyond the range
        if not lost.isfinite() or (self._exact and lost > EXACT * weight_OI.norm()):
            return onednn.pack(weight_OI)
        return HalfWeight(weight_OI)


@hookimpl
def callboard_linear(context: LinearContext) -> Fp16:
    """FBGEMM's products with float16 weights."""
    decode_options("linear.fbgemm_fp16", context.options, Options)
    return Fp16(exact=context.quantization == "none")
