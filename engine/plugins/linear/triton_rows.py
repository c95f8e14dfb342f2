"""Products on a GPU that read a weight as fast as its memory allows where there are few rows; torch's for more rows.

Legend: T rows of the input · I input features · O output features

A decode step of one or a few requests reads every weight for a few rows.  torch's library reads small weights at less
than half of the memory's speed then (docs/performance.md has the figures).
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

PLUGIN = "linear.triton_rows"
CALLBOARD_PLUGIN = {"api": 1, "packages": ["triton"], "devices": ["cuda"], "dtypes": ["bfloat16", "float16"]}
MOST_ROWS: Final = 2  # with more, torch's product reads a large weight faster (docs/performance.md)
MOST_OUTPUTS: Final = 1 << 16  # an LM head with more fills a GPU by torch's product as well
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class RowsWeight:
    """W[O, I] as loaded.  product: multiplies by up to MOST_ROWS rows."""

    def __init__(self, weight_OI: Tensor, product: Product) -> None:
        self._weight_OI = weight_OI.clone(memory_format=torch.contiguous_format)
        self._product = product
        self.nbytes = self._weight_OI.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if len(x_TI) <= MOST_ROWS:
            return self._product(x_TI, self._weight_OI, bias_O)
        return torch.nn.functional.linear(x_TI, self._weight_OI, bias_O)


class FewRows:
    """A kernel that keeps every weight, except those of so many outputs that torch's product reads them fast."""

    def __init__(self, element_bytes: int, product: Product) -> None:
        self.element_bytes = element_bytes
        self._product = product

    def pack(self, weight_OI: Tensor) -> RowsWeight | None:
        """Return a copy of the weight with its products, or None for one of too many outputs."""
        if len(weight_OI) > MOST_OUTPUTS:
            return None
        return RowsWeight(weight_OI, self._product)


@hookimpl
def callboard_linear(context: LinearContext) -> FewRows:
    """Build the kernel; it takes no options.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels.few_rows import multiply_few
    except ImportError as error:
        raise PluginError(
            f"{PLUGIN} needs triton, which cannot be imported ({error}); set plugins.linear=torch"
        ) from error
    return FewRows(getattr(torch, context.dtype).itemsize, multiply_few)
