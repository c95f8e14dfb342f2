"""Products on a GPU with weights in 4 bits, as AWQ, GPTQ and compressed-tensors have them; the input is not rounded.

Legend: T rows of the input · I input features · O output features

A weight takes the file's number of bytes.  For up to 128 rows one kernel reads it once; for more rows, a weight of
floats is made before each product, and torch multiplies.
Owns: parts of a weight as floats.  Does not know: the kernels (``engine/kernels/four_bit_products.py``), files.
"""

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.packing import PackedWeight, StoredRows
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.taken_rows import TakenRows
from engine.types.errors import PluginError

PLUGIN = "linear.triton_blocks"
CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["triton"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16", "float16"],
    "stored_formats": ["int4"],
}
ELEMENT_BYTES = 0.594  # with scales and zeros, in groups of 32


class CodedWeight(PackedWeight, Protocol):
    """A weight in its codes."""

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as floats, [O, I]."""
        ...


class KeptBlocks:
    """A kernel that keeps the rows of such files; weights of floats are left to torch."""

    element_bytes = ELEMENT_BYTES
    reads_rows = False

    def __init__(self, formats: Collection[str], new: Callable[[list[StoredRows], torch.device], CodedWeight]) -> None:
        """Initialize the kernel.  formats: of rows.  new: lays out rows of one format."""
        self._formats = formats
        self._new = new
        self._taken = TakenRows()

    def keep(self, target: Tensor, rows: StoredRows) -> bool:
        """Take the rows (``RowKeeper``)."""
        if rows.format not in self._formats:
            return False
        self._taken.add(target, rows)
        return True

    def keeps(self, weight_OI: Tensor) -> bool:
        """Return whether all rows of the weight were taken."""
        return self._taken.all_of(weight_OI)

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in its codes; None if a part of it, or its format, is another than that of the rest.

        Raises WeightsError."""
        whole = self.keeps(weight_OI)
        parts = self._taken.pop(weight_OI)
        if whole and len({(rows.format, rows.inputs) for _, rows in parts}) == 1:
            return self._new([rows for _, rows in parts], weight_OI.device)
        for part_OI, rows in parts:
            part_OI.copy_(self._new([rows], weight_OI.device).floats(weight_OI.dtype))
        return None


@hookimpl
def callboard_linear(context: LinearContext) -> KeptBlocks:
    """Build the kernel; it takes no options.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels.four_bit_products import FORMATS, FourBitWeight
    except ImportError as error:
        raise PluginError(
            f"{PLUGIN} needs triton, which cannot be imported ({error}); set plugins.linear=torch"
        ) from error
    return KeptBlocks(FORMATS, FourBitWeight)
