"""Products on a GPU in float8 (e4m3): a scale per output of the weight, and one per row of the input.

Legend: T rows of the input · I input features · O output features

torch multiplies a row-major by a column-major matrix; both sides of the weight are multiples of 16, with float32 scales
[T, 1] and [1, O], each without gaps.
"""

import torch
from torch import Tensor

from engine.kernels.float8 import FLOAT8, rounded
from engine.kernels.float8_ops import round_rows
from engine.layers.packing import PackedWeight
from engine.layers.rounded import RoundedRows
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cuda"],
    "dtypes": ["bfloat16"],
    "quantizations": ["fp8"],
    "scale_blocks": [[1, 0]],
    "traceable": True,
}
MULTIPLE = 16  # required of both sides of the weight


class Float8Options(Options, frozen=True):
    """Options of the plugin.

    fast_accumulation: add products as fast as Hopper's tensor cores can, with about 14 bits, not in float32."""

    fast_accumulation: bool = False


class Float8Weight:
    """W[O, I] in float8, scaled so that the largest element of each output's row is float8's largest.

    It is a ``RoundingWeight``."""

    input_group = 0

    def __init__(self, weight_OI: Tensor, fast_accumulation: bool = False) -> None:
        self._fast_accumulation = fast_accumulation
        self._dtype = weight_OI.dtype
        self.input_width = weight_OI.shape[1]
        self._weight_OI, scales_O1 = rounded(weight_OI)
        self._scales_1O = scales_O1.t().contiguous()
        self.nbytes = self._weight_OI.nbytes + self._scales_1O.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if not len(x_TI):
            return torch.empty((0, len(self._weight_OI)), dtype=self._dtype, device=x_TI.device)
        rounded_TI, scales_T1 = (x_TI, x_TI.scales_TG) if isinstance(x_TI, RoundedRows) else round_rows(x_TI)
        y_TO: Tensor = torch.ops.aten._scaled_mm(
            rounded_TI,
            self._weight_OI.t(),
            scales_T1,
            self._scales_1O,
            out_dtype=self._dtype,
            use_fast_accum=self._fast_accumulation,
        )
        return y_TO if bias_O is None else y_TO.add_(bias_O)


class Float8:
    """A kernel that rounds every weight to float8, except those of odd sizes, which the product does not support."""

    element_bytes = FLOAT8.itemsize

    def __init__(self, fast_accumulation: bool = False) -> None:
        self._fast_accumulation = fast_accumulation

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in float8, or None if its size is not supported."""
        if any(size % MULTIPLE for size in weight_OI.shape):
            return None
        return Float8Weight(weight_OI, self._fast_accumulation)


@hookimpl
def callboard_linear(context: LinearContext) -> Float8:
    """Build the kernel of torch's float8 products.  Raises PluginError on a GPU before Ada, which has none."""
    options = decode_options("linear.torch_fp8", context.options, Float8Options)
    return Float8(options.fast_accumulation)
