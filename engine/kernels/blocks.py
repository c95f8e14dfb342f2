"""Weights of 4 to 8 bits as their files store them, and products of float32 rows with them: ``blocks.c`` for one.

Legend: T rows of the input · I input features · O output features
Owns: the memory of a weight, calling the functions.  Does not know: files, the model.
"""

import ctypes
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from engine.kernels.compiled import compiled
from engine.kernels.library import KernelLibrary
from engine.kernels.panels import CompiledWeight, aligned, product_of
from engine.kernels.sources import TILES, tables_of
from engine.layers.packing import StoredRows


class Format(IntEnum):
    """A format of blocks, by ggml's name, or by the scale's type and the number of 4-bit integers that share it."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    MXFP4 = 8
    HALF32 = 9
    HALF64 = 10
    HALF128 = 11
    UPPER32 = 12
    UPPER64 = 13
    UPPER128 = 14


class Parts(IntEnum):
    """The number of bytes that an input element is rounded to, with a scale per group of 16 or 32 elements.

    EXACT: as exact as float32."""

    ROUNDED = 1
    FINE = 2
    EXACT = 3


class Blocks(ctypes.Structure):
    """The C struct ``Blocks``: outputs of a weight that are stored alike."""

    _fields_ = (("panels", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("format", "O", "parts")))


class BlockProducts:
    """The functions of ``blocks.c``."""

    def __init__(self, library: KernelLibrary) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._library, self._given = library, set[str]()
        of_blocks = library.functions_of("blocks.c")
        self._give = of_blocks.give_block_tiles
        self._give.argtypes, self._give.restype = [size, pointer], None
        self.product = product_of(of_blocks, "blocks_product")
        self.bytes_of, self.pack, self.rows = of_blocks.blocks_bytes, of_blocks.blocks_pack, of_blocks.blocks_rows
        self.bytes_of.argtypes, self.bytes_of.restype = [size] * 3, size
        self.pack.argtypes, self.pack.restype = [size] * 3 + [pointer] * 2 + [size], size
        self.rows.argtypes, self.rows.restype = [pointer] * 3 + [size], None

    def need(self, formats: Iterable[str]) -> None:
        """Compile the tiles of these formats, at once, unless there are some.  Raises PluginError."""
        tables = [one for one in tables_of(formats) if one not in self._given]
        for table, address in zip(tables, self._library.tiles(tables) if tables else (), strict=True):
            self._give(TILES["blocks.c"].index(table), address)
        self._given.update(tables)


class StoredWeight(CompiledWeight):
    """W[O, I] as integers of a few bits with scales, in the file's number of bytes; parts may have several formats.

    damaged: the first part with a scale that is NaN or infinite; None for none."""

    def __init__(self, products: BlockProducts, stored: Sequence[StoredRows], parts: Parts) -> None:
        """Copy the rows, in their order, into the layout of the products.  Raises PluginError."""
        products.need(one.format for one in stored)
        inputs = stored[0].inputs
        super().__init__(products.product, sum(len(one.blocks) for one in stored), inputs, len(stored))
        self._blocks = (Blocks * len(stored))()
        self._memory: list[Tensor] = []
        self.nbytes = 0
        self.damaged: StoredRows | None = None
        for one, to in zip(stored, self._blocks, strict=True):
            assert one.inputs == inputs, f"rows have {one.inputs} and {inputs} elements"
            outputs = len(one.blocks)
            to.format, to.O, to.parts = Format[one.format], outputs, parts
            num_bytes = products.bytes_of(to.format, outputs, inputs)
            memory, to.panels = aligned(num_bytes)
            rows = one.blocks.contiguous()
            if products.pack(to.format, outputs, inputs, rows.data_ptr(), to.panels, torch.get_num_threads()):
                self.damaged = self.damaged or one
            self._memory.append(memory)
            self.nbytes += num_bytes
        self.weight.panels = ctypes.addressof(self._blocks)
        self.weight.rows = ctypes.cast(products.rows, ctypes.c_void_p)
        self._rows = products.rows

    def rows(self, outputs_T: Tensor) -> Tensor:
        """Return these rows of the weight as float32, [T, I].  Raises IndexError."""
        if len(outputs_T) and not 0 <= int(outputs_T.min()) <= int(outputs_T.max()) < self.outputs:
            raise IndexError(f"a row of {outputs_T.tolist()} is not among the weight's {self.outputs}")
        outputs_T = outputs_T.to(torch.int64).contiguous()
        out_TI = torch.empty((len(outputs_T), self.inputs))
        self._rows(self.address, outputs_T.data_ptr(), out_TI.data_ptr(), len(outputs_T))
        return out_TI


def block_products() -> BlockProducts | None:
    """Return the functions; None without a C compiler, or without vector instructions that ``blocks.c`` supports."""
    library = compiled()
    if library is None or not library.panel_width():
        return None
    return BlockProducts(library)
