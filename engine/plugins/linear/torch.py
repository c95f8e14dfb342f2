"""Products by torch itself, with weights as loaded: exact, on every device, in every dtype."""

import torch
from torch import Tensor

from engine.layers.packing import PackedWeight
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1, "traceable": True}


class Plain:
    """A kernel that leaves every weight unchanged."""

    def __init__(self, element_bytes: int) -> None:
        self.element_bytes = element_bytes

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return None: torch multiplies by the weight itself."""
        return None


@hookimpl
def callboard_linear(context: LinearContext) -> Plain:
    """Build the kernel of torch's own products, in the dtype of the input; takes no options."""
    decode_options("linear.torch", context.options, Options)
    return Plain(getattr(torch, context.dtype).itemsize)
