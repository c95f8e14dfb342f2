"""Products on a GPU with weights kept as int8 and a scale per output; the input is not rounded.

Legend: T rows of the input · I input features · O output features
"""

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cuda"], "dtypes": ["bfloat16"], "quantizations": ["int8"]}
LARGEST_WEIGHT = 127
SMALLEST = 1e-30  # instead of 0 where all elements are, so that nothing is divided by it


class Int8Weight:
    """W[O, I] as int8, and the largest element of each output's row as its scale."""

    def __init__(self, weight_OI: Tensor) -> None:
        scales_O = weight_OI.float().abs().amax(1).clamp_min_(SMALLEST).div_(LARGEST_WEIGHT)
        self._integers_OI = (weight_OI / scales_O[:, None]).round_().to(torch.int8)
        self._scales_O = scales_O.to(weight_OI.dtype)
        self.nbytes = self._integers_OI.nbytes + self._scales_O.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        y_TO: Tensor = torch.ops.aten._weight_int8pack_mm(x_TI.contiguous(), self._integers_OI, self._scales_O)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class Int8:
    """Rounds every weight to int8."""

    element_bytes = torch.int8.itemsize

    def pack(self, weight_OI: Tensor) -> Int8Weight:
        """See ``LinearKernel.pack``."""
        return Int8Weight(weight_OI)


@hookimpl
def callboard_linear(context: LinearContext) -> Int8:
    """torch's products with int8 weights."""
    decode_options("linear.torch_int8", context.options, Options)
    return Int8()
