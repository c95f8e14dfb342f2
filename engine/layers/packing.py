"""How a loaded weight is laid out for the device that multiplies by it.

Legend: T rows of the input · I input features · O output features
Owns: the choice of layout and the product with it.  Does not know: layers, ranks, files.
"""

import torch
from torch import Tensor

# oneDNN picks a layout for about this many rows; 8 to 512 give the same one, which is best at 1 row as well.
ROWS = 64
# A oneDNN call costs 10 us before it multiplies, more than the whole product of one row with a weight this small: a
# decode step of the demo model alone takes 0.75 of the time with these transposed.
SMALL_BYTES = 4 << 20


class PackedWeight:
    """W[O, I] in oneDNN's blocked layout, for products on a CPU; a small one also transposed, for a single row.

    1.1 to 3.5 times faster than torch's own product at every number of rows (``benchmarks/bench_linear.py``).
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS)
        # Bound here because torch builds without oneDNN lack it.
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._transposed_IO: Tensor | None = None
        if weight_OI.dtype == torch.float32 and weight_OI.nbytes <= SMALL_BYTES:
            self._transposed_IO = weight_OI.t().contiguous()

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        if self._transposed_IO is not None and x_TI.shape[0] == 1:
            if bias_O is None:
                return torch.mm(x_TI, self._transposed_IO)
            return torch.addmm(bias_O, x_TI, self._transposed_IO)
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
