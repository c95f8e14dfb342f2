"""Products on a GPU with int4 weights as AWQ, GPTQ and compressed-tensors store them; the input is not rounded.

Legend: T rows of the input · I input features · O output features · G groups of inputs that share a scale
A row that the checkpoint's reader gives is, for each group, its scale of 16 bits, its zero point, and two integers per
byte, of which the lower ones are the group's first half (``engine/formats/integers.py``).
"""

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.layers.packing import LinearKernel, PackedWeight, StoredRows
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.linear import triton_rows
from engine.plugins.linear.taken import Taken
from engine.plugins.linear.triton_int4 import NibblesWeight
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError, WeightsError

if TYPE_CHECKING:
    from engine.kernels.int4 import Nibbles

PLUGIN = "linear.triton_stored"
CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["triton"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16", "float16"],
    "stored_formats": ["int4"],
}
# By the name of the rows' format: the type of scales, and the inputs that share one.
FORMATS = {
    f"{name}{width}": (dtype, width)
    for name, dtype in (("HALF", torch.float16), ("UPPER", torch.bfloat16))
    for width in (32, 64, 128)
}
HEADER = 3  # bytes of a scale and a zero point


class Stored:
    """A kernel that multiplies by rows as they are stored; a weight of floats is left to ``plain``."""

    element_bytes = 0.5 + 6 / 32  # a scale of 2 bytes and a zero of 4 per group of the kernels

    def __init__(self, plain: LinearKernel, kernels: ModuleType) -> None:
        self._plain = plain
        self._kernels = kernels
        self._taken = Taken()

    def keep(self, target: Tensor, rows: StoredRows) -> bool:
        """Take the rows, if they are in a format that has a product (``RowKeeper``)."""
        if rows.format not in FORMATS or rows.inputs % self._kernels.BLOCK:
            return False
        self._taken.add(target, rows)
        return True

    def keeps(self, weight_OI: Tensor) -> bool:
        """Return whether all rows of the weight were taken."""
        return self._taken.all_of(weight_OI)

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight as it is stored, or as floats if a part of it was not taken.  Raises WeightsError."""
        whole = self.keeps(weight_OI)
        parts = [(first, self._nibbles(rows, weight_OI.device)) for first, rows in self._taken.pop(weight_OI)]
        if whole:
            joined = (torch.cat(of) for of in zip(*(part for _, part in parts), strict=True))
            return NibblesWeight(self._kernels.Nibbles(*joined), self._kernels)
        for first, part in parts:
            wide_OI = self._kernels.widen_nibbles(part, weight_OI.dtype)
            weight_OI[first : first + len(wide_OI)] = wide_OI
        return self._plain.pack(weight_OI)

    def _nibbles(self, rows: StoredRows, device: torch.device) -> "Nibbles":
        """Return rows in the kernels' layout.  Scales are the file's own; zeros are exact in float32."""
        dtype, width = FORMATS[rows.format]
        groups = rows.inputs // width
        stored_OGB = rows.blocks.to(device).view(len(rows.blocks), groups, HEADER + width // 2)
        scales_OG = stored_OGB[:, :, :2].contiguous().view(dtype).squeeze(2)
        if not bool(scales_OG.isfinite().all()):
            raise WeightsError(f"{rows.where} contains NaN or infinity; the file is damaged")
        zeros_OG = scales_OG.float() * (self._kernels.MIDDLE - stored_OGB[:, :, 2].view(torch.int8).float())
        halves_OGB = stored_OGB[:, :, HEADER:]
        integers_OI = torch.cat((halves_OGB & 15, halves_OGB >> 4), 2).flatten(1)
        repeats = width // self._kernels.GROUP
        return self._kernels.Nibbles(
            self._kernels.pack_nibbles(integers_OI),
            scales_OG.repeat_interleave(repeats, 1),
            zeros_OG.repeat_interleave(repeats, 1),
        )


@hookimpl
def callboard_linear(context: LinearContext) -> Stored:
    """Build the kernel; it takes no options.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels import int4
    except ImportError as error:
        problem = f"{PLUGIN} needs triton, which cannot be imported ({error})"
        raise PluginError(f"{problem}; plugins.linear=torch widens the weights") from error
    return Stored(triton_rows.callboard_linear(context), int4)
