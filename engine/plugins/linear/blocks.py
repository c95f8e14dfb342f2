"""Products by callboard's own C with weights of 4 to 8 bits, as GGUF files, AWQ, GPTQ and others have them.

Legend: T rows of the input · I input features · O output features
A weight takes the file's number of bytes, also while it is loaded.  With ``model.quantization = "none"`` the input is
kept to 24 bits, and a product is as exact as in float32 of the weight's floats; with "int8" the input is rounded to 8
bits in groups.  Either way a row has the same bits in every batch, with any number of threads.
Owns: parts of a weight in several formats, or as floats.  Does not know: the kernels (``blocks.c``), files.
"""

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from engine.kernels.blocks import BlockProducts, Format, Parts, StoredWeight, block_products
from engine.layers.packing import LinearKernel, PackedWeight, StoredRows
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.linear import panels
from engine.plugins.options import Options, decode_options
from engine.plugins.support.taken_rows import TakenRows
from engine.types.errors import PluginError, WeightsError

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "quantizations": ["none", "int8"],
    "stored_formats": ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "int4"],
    "instruction_sets": ["avx2", "neon"],
    "invariant": True,
}
# Of an element, with its scales.
BYTES = {
    "Q4_0": 0.5625, "Q4_1": 0.625, "Q5_0": 0.6875, "Q5_1": 0.75, "Q8_0": 1.0625,
    "Q4_K": 0.579, "Q5_K": 0.704, "Q6_K": 0.821, "MXFP4": 0.532, "int4": 0.594,
}  # fmt: skip


class StoredBlocks:
    """A kernel that multiplies by rows as they are stored; a weight of floats is left to ``plain``."""

    reads_rows = True

    def __init__(
        self, functions: BlockProducts, plain: LinearKernel, parts: Parts, element_bytes: float, taken: TakenRows
    ) -> None:
        self._functions = functions
        self._plain = plain
        self._parts = parts
        self._taken = taken
        self.element_bytes = element_bytes

    def keep(self, target: Tensor, rows: StoredRows) -> bool:
        """Take the rows, if they are in a format of blocks that has a product (``RowKeeper``)."""
        if rows.format not in Format.__members__:
            return False
        self._taken.add(target, rows)
        return True

    def keeps(self, weight_OI: Tensor) -> bool:
        """Return whether all rows of the weight were taken."""
        return self._taken.all_of(weight_OI)

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in blocks, or as floats if a part of it is not in blocks.  Raises WeightsError."""
        whole = self.keeps(weight_OI)
        parts = self._taken.pop(weight_OI)
        stored, steps = [rows for _, rows in parts], {part_OI.stride(0) // weight_OI.shape[1] for part_OI, _ in parts}
        if whole and steps == {1}:
            return self._blocks(stored)
        if whole and steps == {len(parts)} and len({one.format for one in stored}) == 1:
            turns = torch.stack([one.blocks for one in stored], 1).flatten(0, 1)
            return self._blocks([replace(stored[0], blocks=turns)])
        for part_OI, rows in parts:
            part_OI.copy_(self._blocks([rows]).rows(torch.arange(len(rows.blocks))))
        return self._plain.pack(weight_OI)

    @property
    def head(self) -> "StoredBlocks":
        """The kernel for the LM head, whose rounding matters most: if the input is rounded, it has twice the bits."""
        parts = Parts.FINE if self._parts == Parts.ROUNDED else self._parts
        plain = self._plain.head if isinstance(self._plain, panels.Panels) else self._plain
        return StoredBlocks(self._functions, plain, parts, self.element_bytes, self._taken)

    def _blocks(self, rows: list[StoredRows]) -> StoredWeight:
        alike = [list(group) for _, group in groupby(rows, key=lambda one: one.format)]
        joined = [
            replace(of[0], blocks=torch.cat([one.blocks for one in of])) if len(of) > 1 else of[0] for of in alike
        ]
        weight = StoredWeight(self._functions, joined, self._parts)
        if weight.damaged is not None:
            raise WeightsError(f"{weight.damaged.where} contains NaN or infinity; the file is damaged")
        return weight


@hookimpl
def callboard_linear(context: LinearContext) -> StoredBlocks:
    """Build the kernel; takes no options.  Raises PluginError if its kernels could not be compiled."""
    decode_options("linear.blocks", context.options, Options)
    functions = block_products()
    if functions is None:
        raise PluginError(
            "linear.blocks: its kernels are compiled on this machine, but are not (no C compiler, no AVX2 or NEON, or "
            "CALLBOARD_KERNELS=torch); install one (cc, or CC), or set plugins.linear to another kernel"
        )
    functions.need(context.stored_formats)
    parts = Parts.EXACT if context.quantization == "none" else Parts.ROUNDED
    element_bytes = max((BYTES.get(one, 4.0) for one in context.stored_formats), default=4.0)
    return StoredBlocks(functions, panels.callboard_linear(context), parts, element_bytes, TakenRows())
