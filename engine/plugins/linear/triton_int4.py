"""Products on a GPU with int4 weights, with a scale and a zero point per 32 inputs; the input is not rounded.

Legend: T rows of the input · I input features · O output features · G groups of inputs

The kernels read a weight once for up to 64 rows.  For more rows it is written in 16 bits first, and torch multiplies.
"""

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

if TYPE_CHECKING:
    from engine.kernels.int4 import Nibbles

PLUGIN = "linear.triton_int4"
CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["triton"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16"],
    "quantizations": ["int4"],
}
LARGEST = 15  # an integer
SMALLEST = 1e-30  # replaces a scale of 0, which must not be a divisor


class NibblesWeight:
    """W[O, I] as integers of 4 bits.  kernels: ``engine/kernels/int4.py``."""

    def __init__(self, weight: "Nibbles", kernels: ModuleType) -> None:
        self._weight = weight
        self._kernels = kernels
        self.nbytes = sum(one.nbytes for one in weight)

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias."""
        if len(x_TI) > self._kernels.SOME_ROWS:
            return torch.nn.functional.linear(x_TI, self._kernels.widen_nibbles(self._weight, x_TI.dtype), bias_O)
        y_TO: Tensor = self._kernels.multiply_nibbles(x_TI, self._weight)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class Int4:
    """A kernel that rounds every weight to int4, except those whose inputs do not fill blocks."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self.element_bytes = 0.5 + 2 * torch.bfloat16.itemsize / kernels.GROUP

    def pack(self, weight_OI: Tensor) -> NibblesWeight | None:
        """Return the weight as int4, from the smallest to the largest element of each group, or None if its size is not
        supported."""
        if weight_OI.shape[1] % self._kernels.BLOCK:
            return None
        groups_OGI = weight_OI.float().unflatten(1, (-1, self._kernels.GROUP))
        low_OG, high_OG = groups_OGI.aminmax(dim=2)
        scales_OG = (high_OG - low_OG).div_(LARGEST).clamp_min_(SMALLEST)
        # Rounded by the scales and zeros as stored, so that their own rounding costs little.
        scales_OG = scales_OG.bfloat16()
        zeros_OG = (low_OG + self._kernels.MIDDLE * scales_OG).bfloat16()
        integers_OGI = (groups_OGI - zeros_OG[:, :, None]).div_(scales_OG[:, :, None]).round_()
        bytes_OB = self._kernels.pack_nibbles(integers_OGI.add_(self._kernels.MIDDLE).clamp_(0, LARGEST).flatten(1))
        return NibblesWeight(self._kernels.Nibbles(bytes_OB, scales_OG, zeros_OG), self._kernels)


@hookimpl
def callboard_linear(context: LinearContext) -> Int4:
    """Build the kernel of products with int4 weights; takes no options.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels import int4
    except ImportError as error:
        raise PluginError(
            f"{PLUGIN} needs triton, which cannot be imported ({error}); model.quantization=none does not need it"
        ) from error
    return Int4(int4)
