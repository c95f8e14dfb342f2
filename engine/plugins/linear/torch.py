"""Products by torch itself, with weights as they were loaded: exact, on every device, in every dtype."""

import torch
from torch import Tensor

from engine.layers.packing import PackedWeight
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1, "traceable": True}


class Plain:
    """Leaves every weight as it is."""

    def __init__(self, element_bytes: int) -> None:
        self.element_bytes = element_bytes

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """See ``LinearKernel.pack``."""
        return None


@hookimpl
def callboard_linear(context: LinearContext) -> Plain:
    """torch's own products, in the dtype of the input."""
    decode_options("linear.torch", context.options, Options)
    return Plain(getattr(torch, context.dtype).itemsize)
