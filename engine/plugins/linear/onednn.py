"""Products by oneDNN with weights in its blocked layout; exact, and the default on CPUs.

Legend: T rows of the input · P rows it is padded to · I input features · O output features
Owns: the layout and its product.  Does not know: layers, ranks, files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.packing import Linears
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cpu"], "traceable": True, "invariant": True}

# oneDNN picks a layout for about this many rows; 4 to 512 rows give the same, blocked one.
ROWS = 64
# For one row it picks the weight's own order.  If a weight exceeds the caches, AVX2 reads that faster than blocks: a
# single row takes 0.7 to 0.8 of the time, several take 1.0 to 1.2 of theirs (``benchmarks/bench_linear.py``).
ROWS_AVX2 = 1
# A oneDNN call costs 10 us before it multiplies, more than the whole product of one row with so small a weight: a
# decode step of the demo model alone takes 0.75 of the time with these transposed.
SMALL_BYTES = 4 << 20
# With AVX-512 a product of one to three rows reads a weight beyond the caches more slowly than one of four, which takes
# 0.7 to 0.8 of a single row's time; with AVX2 a single row's is the fastest (``benchmarks/bench_linear.py``).
ROWS_AVX512 = 4
# oneDNN compiles a product for every (weight's shape, number of rows) and keeps it: up to 0.6 MB and 3 ms each.  With
# this many sizes between a power of two and the next there are few products (``benchmarks/bench_rows.py``).
SIZES_PER_OCTAVE = 4
COMPILED_BYTES = 640 << 10


class BlockedWeight:
    """W[O, I] in oneDNN's layout, for products on a CPU; a small one is also kept transposed, for a single row.

    A blocked product gives a row the same bits for every number of rows from two on; a single row has other bits with
    AVX-512 and 2048 inputs or more, and from the transposed weight in any case.
    1.1 to 3.5 times faster than torch's own product at every number of rows (``benchmarks/bench_linear.py``).
    """

    def __init__(self, weight_OI: Tensor, invariant: bool = False) -> None:
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight_OI, layout_rows(weight_OI, invariant))
        self._fewest_rows = fewest_rows(weight_OI.nbytes, invariant)
        self._transposed_IO: Tensor | None = None
        if weight_OI.dtype == torch.float32 and weight_OI.nbytes <= SMALL_BYTES and not invariant:
            self._transposed_IO = weight_OI.t().contiguous()
        self.nbytes = weight_OI.nbytes * (1 if self._transposed_IO is None else 2)

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._transposed_IO is not None and x_TI.shape[0] == 1:
            if bias_O is None:
                return torch.mm(x_TI, self._transposed_IO)
            return torch.addmm(bias_O, x_TI, self._transposed_IO)
        # Padded at run time: ``engine/graphs/compiled.py`` replaces the traced product.
        if torch.compiler.is_dynamo_compiling():
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, self._blocked, bias_O, "none", [], "")
            return y_TO
        return padded_product(x_TI, self._blocked, bias_O, self._fewest_rows)


def layout_rows(weight_OI: Tensor, invariant: bool = False) -> int:
    """Return the number of rows for which oneDNN lays a weight out; invariant products have one layout on all CPUs."""
    is_large = weight_OI.dtype == torch.float32 and weight_OI.nbytes > SMALL_BYTES
    if is_large and not invariant and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ROWS_AVX2
    return ROWS


def fewest_rows(weight_bytes: int, invariant: bool = False) -> int:
    """Return the least number of rows of a product with such a weight.  invariant: as in ``LinearContext``."""
    if weight_bytes > SMALL_BYTES and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return ROWS_AVX512
    return 2 if invariant else 1


def padded_product(x_TI: Tensor, blocked_OI: Tensor, bias_O: Tensor | None, fewest_rows: int = 1) -> Tensor:
    """Return x W^T + bias, padded to one of few numbers of rows, and to at least ``fewest_rows``."""
    num_rows = x_TI.shape[0]
    padding = padded_rows(max(num_rows, fewest_rows)) - num_rows
    x_PI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI
    y_PO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_PI, blocked_OI, bias_O, "none", [], "")
    return y_PO[:num_rows] if padding else y_PO  # a slice takes as long as a small product


def padded_rows(num_rows: int) -> int:
    """Return the smallest number of rows, of at least ``num_rows``, that a product is compiled for."""
    step = max(1, (1 << num_rows.bit_length() - 1) // SIZES_PER_OCTAVE) if num_rows else 1
    return -(-num_rows // step) * step


def num_padded_sizes(most_rows: int) -> int:
    """Return how many numbers of rows products are compiled for, up to ``most_rows``."""
    return len({padded_rows(rows) for rows in range(1, most_rows + 1)})


def pack(weight_OI: Tensor, invariant: bool = False) -> BlockedWeight | None:
    """Return the weight in blocks; None if oneDNN cannot multiply by it here.  invariant: as in ``LinearContext``."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight_OI.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight_OI.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    return BlockedWeight(weight_OI, invariant)


class OneDNN:
    """A kernel with weights in the dtype of the input.  Weights that oneDNN does not support are left to torch."""

    def __init__(self, element_bytes: int, invariant: bool = False) -> None:
        self.element_bytes = element_bytes
        self._invariant = invariant

    def pack(self, weight_OI: Tensor) -> BlockedWeight | None:
        """Return the weight in blocks, or None if oneDNN cannot multiply by it."""
        return pack(weight_OI, self._invariant)


def onednn_linears(dtype: torch.dtype) -> Linears:
    """Return the kernels of a model whose weights are not rounded; on a GPU these are torch's products."""
    kernel = OneDNN(dtype.itemsize)
    return Linears(kernel, kernel)


@hookimpl
def callboard_linear(context: LinearContext) -> OneDNN:
    """Build the kernel of oneDNN's products, in the dtype of the input; takes no options.

    Raises PluginError for invariant products in bfloat16 on a CPU with AMX."""
    decode_options("linear.onednn", context.options, Options)
    sets = context.instruction_sets
    has_amx = torch.cpu._is_amx_tile_supported() if sets is None else "amx" in sets
    if context.invariant and context.dtype == "bfloat16" and has_amx:
        raise PluginError(
            "linear.onednn: with AMX a row in bfloat16 has other bits in a product of two rows than in one of many; "
            "model.dtype=float32 has the same, or set model.numerics=fast"
        )
    return OneDNN(getattr(torch, context.dtype).itemsize, context.invariant)
