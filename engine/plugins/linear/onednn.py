"""Products by oneDNN with weights in its blocked layout: exact, and the default on CPUs.

Legend: T rows of the input · P rows it is padded to · I input features · O output features
Owns: the layout and the product with it.  Does not know: layers, ranks, files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.packing import Linears
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cpu"], "traceable": True, "invariant": True}

# oneDNN picks a layout for about this many rows; 4 to 512 give the same one, with blocks.
ROWS = 64
# For one row it picks the weight's own order.  Of a weight beyond the caches AVX2 reads that faster than blocks: a
# single row takes 0.7 to 0.8 of the time, several take 1.0 to 1.2 of theirs (``benchmarks/bench_linear.py``).
ROWS_AVX2 = 1
# A oneDNN call costs 10 us before it multiplies, more than the whole product of one row with a weight this small: a
# decode step of the demo model alone takes 0.75 of the time with these transposed.
SMALL_BYTES = 4 << 20
# With AVX-512 a product of one to three rows reads a weight beyond the caches slower than one of four does, which takes
# 0.7 to 0.8 of a single row's time; with AVX2 a single row's is the fastest (``benchmarks/bench_linear.py``).
ROWS_AVX512 = 4
# oneDNN compiles a product for every (weight's shape, number of rows) and keeps it: up to 0.6 MB and 3 ms each.  With
# so many numbers of rows between a power of two and the next there are few (``benchmarks/bench_rows.py``).
SIZES_PER_OCTAVE = 4
COMPILED_BYTES = 640 << 10


class BlockedWeight:
    """W[O, I] in the layout that oneDNN picks, for products on a CPU; a small one also transposed, for a single row.

    A product with the blocks gives a row the same bits at every number of rows from two on; a single row has others
    with AVX-512 and 2048 inputs or more, and from the transposed weight in any case.
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
        """x W^T + bias."""
        if self._transposed_IO is not None and x_TI.shape[0] == 1:
            if bias_O is None:
                return torch.mm(x_TI, self._transposed_IO)
            return torch.addmm(bias_O, x_TI, self._transposed_IO)
        # Padded when it runs: ``engine/graphs/compiled.py`` replaces the traced product.
        if torch.compiler.is_dynamo_compiling():
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, self._blocked, bias_O, "none", [], "")
            return y_TO
        return padded_product(x_TI, self._blocked, bias_O, self._fewest_rows)


def layout_rows(weight_OI: Tensor, invariant: bool = False) -> int:
    """For how many rows oneDNN is to lay a weight out; invariant products have one layout on all CPUs."""
    is_large = weight_OI.dtype == torch.float32 and weight_OI.nbytes > SMALL_BYTES
    if is_large and not invariant and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ROWS_AVX2
    return ROWS


def fewest_rows(weight_bytes: int, invariant: bool = False) -> int:
    """How many rows a product with such a weight is made of at least; see ``LinearContext`` for ``invariant``."""
    if weight_bytes > SMALL_BYTES and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return ROWS_AVX512
    return 2 if invariant else 1


def padded_product(x_TI: Tensor, blocked_OI: Tensor, bias_O: Tensor | None, fewest_rows: int = 1) -> Tensor:
    """x W^T + bias, by a product of one of few numbers of rows, and of no fewer than ``fewest_rows``."""
    num_rows = x_TI.shape[0]
    padding = padded_rows(max(num_rows, fewest_rows)) - num_rows
    x_PI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI
    y_PO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_PI, blocked_OI, bias_O, "none", [], "")
    return y_PO[:num_rows] if padding else y_PO  # a slice takes as long as a small product


def padded_rows(num_rows: int) -> int:
    """The smallest number of rows that a product is compiled for and that holds ``num_rows``."""
    step = max(1, (1 << num_rows.bit_length() - 1) // SIZES_PER_OCTAVE) if num_rows else 1
    return -(-num_rows // step) * step


def num_padded_sizes(most_rows: int) -> int:
    """How many numbers of rows there are up to ``most_rows``."""
    return len({padded_rows(rows) for rows in range(1, most_rows + 1)})


def pack(weight_OI: Tensor, invariant: bool = False) -> BlockedWeight | None:
    """The weight in blocks; None if oneDNN cannot multiply by it here.  invariant: see ``LinearContext``."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight_OI.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight_OI.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    return BlockedWeight(weight_OI, invariant)


class OneDNN:
    """Weights in the dtype of the input.  What oneDNN cannot multiply by stays as it is."""

    def __init__(self, element_bytes: int, invariant: bool = False) -> None:
        self.element_bytes = element_bytes
        self._invariant = invariant

    def pack(self, weight_OI: Tensor) -> BlockedWeight | None:
        """See ``LinearKernel.pack``."""
        return pack(weight_OI, self._invariant)


def onednn_linears(dtype: torch.dtype) -> Linears:
    """The kernels of a model whose weights are not rounded; on a GPU that is torch's products."""
    kernel = OneDNN(dtype.itemsize)
    return Linears(kernel, kernel)


@hookimpl
def callboard_linear(context: LinearContext) -> OneDNN:
    """oneDNN's products, in the dtype of the input."""
    decode_options("linear.onednn", context.options, Options)
    return OneDNN(getattr(torch, context.dtype).itemsize, context.invariant)
