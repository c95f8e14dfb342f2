"""Products on a GPU with int4 weights, with a scale and a zero point per 32 inputs; the input is not rounded.

Legend: T rows of the input · I input features · O output features · G groups of inputs
torch lays weights out in tiles: 8 outputs, and 16 inputs times 2, 4 or 8.
"""

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cuda"], "dtypes": ["bfloat16"], "quantizations": ["int4"]}
GROUP = 32
LARGEST, MIDDLE = 15, 8  # of an integer, relative to the middle
OUTPUTS, INPUTS = 8, 16  # of a tile
SMALLEST = 1e-30  # replaces a scale of 0, which must not be a divisor


def pairs(integers_OI: Tensor) -> Tensor:
    """Return two integers per byte, the first in the upper half: [O, I / 2] of uint8, torch's form on a GPU."""
    return (integers_OI[:, ::2] << 4 | integers_OI[:, 1::2]).to(torch.uint8)


def tiles(inputs: int) -> int:
    """Return how many tiles of 16 inputs are read at once: the most, up to 8, that divide the inputs."""
    return next(count for count in (8, 4, 2) if inputs % (count * INPUTS) == 0)


class Int4Weight:
    """W[O, I] as int4, spanning the smallest to the largest element of each group."""

    def __init__(self, weight_OI: Tensor) -> None:
        groups_OGI = weight_OI.float().unflatten(1, (-1, GROUP))
        low_OG, high_OG = groups_OGI.aminmax(dim=2)
        scales_OG = (high_OG - low_OG).div_(LARGEST).clamp_min_(SMALLEST)
        # Rounded by the scales and zeros as stored, so that their own rounding costs little.
        scales_OG, zeros_OG = scales_OG.bfloat16(), (low_OG + MIDDLE * scales_OG).bfloat16()
        integers_OGI = (groups_OGI - zeros_OG[:, :, None]).div_(scales_OG[:, :, None]).round_().add_(MIDDLE)
        integers_OI = integers_OGI.clamp_(0, LARGEST).to(torch.int32).flatten(1)
        if weight_OI.is_cuda:
            self._packed = torch.ops.aten._convert_weight_to_int4pack(pairs(integers_OI), tiles(weight_OI.shape[1]))
            self._product = torch.ops.aten._weight_int4pack_mm
        else:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers_OI, 1)
            self._product = torch.ops.aten._weight_int4pack_mm_for_cpu
        self._scales_and_zeros_GO2 = torch.stack((scales_OG.t(), zeros_OG.t()), -1).contiguous()
        self._outputs = len(weight_OI)
        self.nbytes = self._packed.nbytes + self._scales_and_zeros_GO2.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if not len(x_TI):
            return x_TI.new_empty((0, self._outputs))
        y_TO: Tensor = self._product(x_TI.contiguous(), self._packed, GROUP, self._scales_and_zeros_GO2)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class Int4:
    """A kernel that rounds every weight to int4, except those whose sizes do not fill tiles and groups."""

    element_bytes = 0.5 + 2 * torch.bfloat16.itemsize / GROUP

    def pack(self, weight_OI: Tensor) -> Int4Weight | None:
        """Return the weight as int4, or None if its size is not supported."""
        outputs, inputs = weight_OI.shape
        return None if outputs % OUTPUTS or inputs % GROUP else Int4Weight(weight_OI)


@hookimpl
def callboard_linear(context: LinearContext) -> Int4:
    """Build the kernel of torch's products with int4 weights; takes no options."""
    decode_options("linear.torch_int4", context.options, Options)
    return Int4()
