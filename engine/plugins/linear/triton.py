"""Products on a GPU with the same bits for a row whatever other rows there are, by a kernel of this project's own.

Legend: T rows of the input · I input features · O output features

For ``model.numerics = "invariant"``, and by name; slower than torch's where there are many rows.
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
    """W[O, I] as it was loaded."""

    def __init__(self, weight_OI: Tensor, product: Product) -> None:
        self._weight_OI = weight_OI.clone(memory_format=torch.contiguous_format)
        self._product = product
        self.nbytes = self._weight_OI.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        return self._product(x_TI, self._weight_OI, bias_O)


class Fixed:
    """Keeps every weight, and multiplies by it in tiles of one size."""

    def __init__(self, element_bytes: int, product: Product) -> None:
        self.element_bytes = element_bytes
        self._product = product

    def pack(self, weight_OI: Tensor) -> FixedWeight:
        """See ``LinearKernel.pack``."""
        return FixedWeight(weight_OI, self._product)


@hookimpl
def callboard_linear(context: LinearContext) -> Fixed:
    """In every dtype; sums are float32's.  Raises PluginError without triton."""
    decode_options(PLUGIN, context.options, Options)
    try:
        from engine.kernels.fixed_products import fixed_product
    except ImportError as error:
        problem = f"{PLUGIN} needs triton, which cannot be imported ({error})"
        raise PluginError(f"{problem}; set plugins.linear=torch and model.numerics=fast") from error
    return Fixed(getattr(torch, context.dtype).itemsize, fixed_product)
