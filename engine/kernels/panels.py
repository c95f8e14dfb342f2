"""Weights in panels of outputs, and products of float32 rows with them: ``products.c`` for one weight.

Legend: T rows of the input · I input features · O output features
Owns: the memory of a packed weight, calling the functions.  Does not know: the model, which weights may be rounded.
"""

import ctypes
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from engine.kernels.compiled import compiled
from engine.kernels.library import KernelLibrary
from engine.kernels.sources import TILES

ALIGNMENT = 64  # a cache line


class PanelKind(IntEnum):
    """The type of a stored element.

    UPPER_HALVES: bfloat16, lossless for floats whose lower 16 bits are zero.
    PAIRS: bfloat16, and a row of the input is rounded to it, too; sums are float32.
    BYTES: int8 with a scale per 64 inputs of an output.  A row of the input is rounded with a scale per 64 elements,
    to 8 bits (7 without VNNI).  FINE_BYTES: the same with twice as many bits for the input."""

    FLOATS = 0
    HALVES = 1
    UPPER_HALVES = 2
    PAIRS = 3
    BYTES = 4
    FINE_BYTES = 5


class Weight(ctypes.Structure):
    """The C struct ``Weight`` of ``cpu.h``.  Its maker owns the memory that ``panels`` points to."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("O", "I", "kind")),
        *((name, ctypes.c_void_p) for name in ("product", "rows")),
    )


class Products:
    """The functions of ``products.c``.  has_pairs: whether the CPU multiplies bfloat16."""

    def __init__(self, library: KernelLibrary) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._library, self._given = library, {PanelKind.FLOATS}
        library.give_tiles.argtypes, library.give_tiles.restype = [size, pointer], None
        self.packed_bytes, self.pack = library.packed_bytes, library.pack
        self.has_pairs = bool(library.pair_products())
        self.product = product_of(library, "product")
        self.packed_bytes.argtypes, self.packed_bytes.restype = [pointer], size
        self.pack.argtypes, self.pack.restype = [pointer] * 3 + [size], None

    def need(self, kind: PanelKind) -> None:
        """Compile the tiles of this kind unless there are some.  Raises PluginError."""
        kind = min(kind, PanelKind.BYTES)  # FINE_BYTES has the same
        if kind not in self._given:
            (address,) = self._library.tiles([TILES["products.c"][kind - 1]])
            self._library.give_tiles(kind, address)
            self._given.add(kind)


def product_of(library: ctypes.CDLL, name: str) -> Any:
    """Return a function that is the ``product`` of a ``Weight``."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    product = getattr(library, name)
    product.argtypes, product.restype = [pointer] * 2 + [size] + [pointer] * 2 + [size] * 2, size
    return product


class CompiledWeight:
    """W[O, I] in a layout of C.  A row has the same bits whatever the other rows and the number of threads."""

    nbytes: int

    def __init__(self, product: Any, outputs: int, inputs: int, kind: int) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.weight = Weight(None, outputs, inputs, kind, ctypes.cast(product, ctypes.c_void_p))
        self.address = ctypes.addressof(self.weight)
        self._product = product

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias.  Raises MemoryError."""
        num_rows, inputs = x_TI.shape
        assert inputs == self.inputs, f"a row has {inputs} elements, not {self.inputs}"
        assert x_TI.dtype == torch.float32, f"{x_TI.dtype} is not float32"
        row_step, step = x_TI.stride()
        if step != 1:
            x_TI = x_TI.contiguous()
            row_step = inputs
        y_TO = x_TI.new_empty((num_rows, self.outputs))
        bias = None if bias_O is None else bias_O.data_ptr()
        if self._product(
            self.address, x_TI.data_ptr(), row_step, bias, y_TO.data_ptr(), num_rows, torch.get_num_threads()
        ):
            raise MemoryError(f"no memory to round {num_rows} rows of {inputs} elements")
        return y_TO


class PanelWeight(CompiledWeight):
    """A weight in panels of numbers of one kind."""

    def __init__(self, products: Products, weight_OI: Tensor, kind: PanelKind) -> None:
        """Pack the weight.  weight_OI: float32, on a CPU; its values must fit the kind.  Raises PluginError."""
        products.need(kind)
        assert weight_OI.dtype == torch.float32, f"{weight_OI.dtype} is not float32"
        weight_OI = weight_OI.contiguous()
        outputs, inputs = weight_OI.shape
        super().__init__(products.product, outputs, inputs, kind)
        self.nbytes = products.packed_bytes(self.address)
        self._memory, self.weight.panels = aligned(self.nbytes)
        products.pack(self.address, weight_OI.data_ptr(), self.weight.panels, torch.get_num_threads())


def aligned(num_bytes: int) -> tuple[Tensor, int]:
    """Return memory, and the address in it from which on so many bytes are free and in whole cache lines."""
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    return memory, -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT


def products() -> Products | None:
    """Return the functions; None without a C compiler, or without vector instructions that ``products.c`` supports."""
    library = compiled()
    if library is None or not library.panel_width():
        return None
    return Products(library)
