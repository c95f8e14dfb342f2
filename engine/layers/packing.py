"""How a loaded weight is laid out for the device that multiplies by it.

Legend: T rows of the input · I input features · O output features
Owns: the choice of layout and the product with it.  Does not know: layers, ranks, files.
"""

import torch
from torch import Tensor

# oneDNN picks a layout for about this many rows; 8 to 512 give the same one, which is best at 1 row as well.
ROWS = 64


class PackedWeight:
    """W[O, I] in oneDNN's blocked layout, for products on a CPU.

    1.2 to 3.5 times faster than torch's own product at every number of rows (``benchmarks/bench_linear.py``).
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS)
        # Bound here because torch builds without oneDNN lack it.
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        y_TO: Tensor = self._product(x_TI, self._blocked, bias_O, "none", [], "")
        return y_TO


def pack(weight_OI: Tensor) -> PackedWeight | None:
    """The weight's best layout on its device; None if that is the one it has."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight_OI.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight_OI.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    return PackedWeight(weight_OI)
