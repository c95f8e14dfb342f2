"""Products of float32 inputs with int8 weights in FBGEMM's layout: a scale per output, and one per row of the input.

Legend: T rows of the input · I input features · O output features
Weights have 8 bits, the input has 7: with 8 on both sides the sum of two products overflows the 16 bits that AVX2's
``vpmaddubsw`` has for it and is cut off.  Each row has its own scale, so other rows do not change its result, and sums
of integers do not depend on their order: a row has the same bits in every batch.
"""

import warnings

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "quantizations": ["int8"],
    "instruction_sets": ["avx2"],
    "invariant": True,
}
LARGEST_WEIGHT = 127
# The input from -1 to 1 becomes 1 to 127, with 64 for zero.
INPUT_SCALE, INPUT_ZERO = 1 / 63, 64
# The overload itself, since a call by name takes 5 us more to find it.
_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
SMALLEST = 1e-30  # replaces a scale of 0, which must not be a divisor


class FbgemmInt8Weight:
    """W[O, I] as int8, with the largest element of each output's row as its scale."""

    def __init__(self, weight_OI: Tensor) -> None:
        scales_O = weight_OI.abs().amax(1).clamp_min_(SMALLEST).div_(LARGEST_WEIGHT)
        integers_OI = (weight_OI / scales_O[:, None]).round_().to(torch.int8)
        zeros_O = torch.zeros(len(scales_O), dtype=torch.int64)
        with warnings.catch_warnings():
            # torch will drop tensors of this dtype some day; the packed weight is not one.
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*", UserWarning)
            quantized_OI = torch._make_per_channel_quantized_tensor(integers_OI, scales_O.double(), zeros_O, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantized_OI, None)
        self.nbytes = weight_OI.numel() + scales_O.nbytes * 3  # with FBGEMM's zero points and sums of the rows

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        # A row of zeros becomes 0 / 0, then some integers, finite sums of them and, times its scale of 0, zeros again.
        scales_T1 = x_TI.abs().amax(1, keepdim=True)
        y_TO: Tensor = _product(x_TI / scales_T1, INPUT_SCALE, INPUT_ZERO, self._packed).mul_(scales_T1)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class FbgemmInt8:
    """A kernel that rounds every weight to int8."""

    element_bytes = torch.int8.itemsize

    def pack(self, weight_OI: Tensor) -> FbgemmInt8Weight:
        """Return the weight as int8."""
        return FbgemmInt8Weight(weight_OI)


@hookimpl
def callboard_linear(context: LinearContext) -> FbgemmInt8:
    """Build the kernel of FBGEMM's products with int8 weights; takes no options."""
    decode_options("linear.fbgemm_int8", context.options, Options)
    return FbgemmInt8()
