"""Products on a GPU that give a row the same bits in every batch, by a kernel of this project.

Legend: T rows of the input · I input features · O output features

Used for ``model.numerics = "invariant"``, or by name; slower than torch's product if there are many rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

PLUGIN = "linear.triton"
CALLBOARD_PLUGIN = {"api": 1, "packages": ["triton"], "devices": ["cuda"], "invariant": True}
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class FixedWeight:
    """W[O, I] as loaded."""

    def __init__(self, weight_OI: Tensor, product: Product) -> None:
        self._weight_OI = weight_OI.clone(memory_format=torch.contiguous_format)
        self._product = product
        self.nbytes = self._weight_OI.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self._product(x_TI, self._weight_OI, bias_O)


class Fixed:
    """A kernel that keeps every weight, and multiplies by it in tiles of one size."""

    def __init__(self, element_bytes: int, product: Product) -> None:
        self.element_bytes = element_bytes
        self._product = product

    def pack(self, weight_OI: Tensor) -> FixedWeight:
        """Return a copy of the weight with its product."""
        return FixedWeight(weight_OI, self._product)


@hookimpl
def callboard_linear(context: LinearContext) -> Fixed:
    """Build the kernel, for every dtype; sums are in float32.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels.fixed_products import fixed_product
    except ImportError as error:
        problem = f"{PLUGIN} needs triton, which cannot be imported ({error})"
        raise PluginError(f"{problem}; set plugins.linear=torch and model.numerics=fast") from error
    return Fixed(getattr(torch, context.dtype).itemsize, fixed_product)
