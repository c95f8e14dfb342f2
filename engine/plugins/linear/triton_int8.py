"""Products on a GPU with int8 weights and a scale per output; the input is not rounded.

Legend: T rows of the input · I input features · O output features

torch's own product, ``_weight_int8pack_mm``, does not use tensor cores and reads the weight again for every row.  The
kernels here read it once: as vectors for up to 4 rows, in tiles for up to 64.  For more rows, converting the weight to
the input's dtype costs less: that is done before each product, and torch multiplies.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

PLUGIN = "linear.triton_int8"
CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["triton"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16"],
    "quantizations": ["int8"],
}
LARGEST_WEIGHT: Final = 127
SMALLEST: Final = 1e-30  # replaces a scale of 0, which must not be a divisor
FEW_ROWS: Final = 64  # a tile of rows
LARGE: Final = 1 << 24  # elements; half as many rows are multiplied as vectors (docs/performance.md)
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


class Int8Weight:
    """W[O, I] as int8, with the largest element of each output's row as its scale."""

    def __init__(self, weight_OI: Tensor, products: Mapping[int, Product]) -> None:
        scales_O = weight_OI.float().abs().amax(1).clamp_min_(SMALLEST).div_(LARGEST_WEIGHT)
        self._integers_OI = (weight_OI / scales_O[:, None]).round_().to(torch.int8)
        self._scales_O = scales_O.to(weight_OI.dtype)
        self._products = products
        self.nbytes = self._integers_OI.nbytes + self._scales_O.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        for most_rows, product in self._products.items():
            if len(x_TI) <= most_rows:
                return product(x_TI, self._integers_OI, bias_O, self._scales_O)
        wide_OI = self._integers_OI.to(x_TI.dtype)  # exact: integers of 7 bits
        y_TO = torch.nn.functional.linear(x_TI, wide_OI).mul_(self._scales_O)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class Int8:
    """A kernel that rounds every weight to int8."""

    element_bytes = torch.int8.itemsize

    def __init__(self, products: Mapping[int, Product]) -> None:
        """Initialize the kernel.  products: by the most rows that each multiplies, ascending."""
        self._products = products
        few = next(iter(products))
        self._of_large = {few // 2 if rows == few else rows: product for rows, product in products.items()}

    def pack(self, weight_OI: Tensor) -> Int8Weight:
        """Return the weight as int8."""
        return Int8Weight(weight_OI, self._of_large if weight_OI.numel() > LARGE else self._products)


@hookimpl
def callboard_linear(context: LinearContext) -> Int8:
    """Build the kernel of products with int8 weights.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels.few_rows import MOST_ROWS, multiply_few
        from engine.kernels.fixed_products import fixed_product
    except ImportError as error:
        raise PluginError(
            f"{PLUGIN} needs triton, which cannot be imported ({error}); model.quantization=none does not need it"
        ) from error
    return Int8({MOST_ROWS: multiply_few, FEW_ROWS: fixed_product})
