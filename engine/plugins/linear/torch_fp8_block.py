"""Products on Hopper in float8 (e4m3): a scale per block of 128 x 128 of the weight, and one per 128 inputs of a row.

Legend: T rows of the input · I input features · O output features
        B blocks of outputs · C blocks of inputs, L padded to a multiple of four

torch (2.11, CUDA 12.9) multiplies a row-major by a column-major matrix, with float32 scales [T, C] and [L, B], whose
columns are contiguous.  The weights of DeepSeek's and Qwen's FP8 checkpoints have this form.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.choice import choose_kernels
from engine.kernels.float8 import FLOAT8, GROUP
from engine.kernels.float8_blocks import in_blocks
from engine.kernels.float8_ops import round_rows
from engine.layers.packing import PackedWeight
from engine.layers.rounded import RoundedRows
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

PLUGIN = "linear.torch_fp8_block"
CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cuda"],
    "dtypes": ["bfloat16"],
    "quantizations": ["fp8"],
    "scale_blocks": [[128, 128]],
    "traceable": True,
}
MULTIPLE = 16  # required of outputs; inputs are whole groups
SCALES_MULTIPLE = 4  # columns of scales begin at 16 bytes
FEW_ROWS = 4  # up to which a kernel of this project reads the weight faster than torch's product
TRIAL_ERROR = 0.05  # of a product of rounded numbers, relative to its size


@torch.library.custom_op("callboard::multiply_blocks", mutates_args=())
def multiply_blocks(x_TI: Tensor, scales_TC: Tensor, weight_OI: Tensor, scales_LB: Tensor, num_rows: int) -> Tensor:
    """Return bfloat16 [num_rows, O]; x may have more rows.  A compiler sees one operation."""
    if num_rows <= FEW_ROWS and choose_kernels(x_TI.device) is not None:
        from engine.kernels.few_rows import multiply_few_blocks  # needs triton

        return multiply_few_blocks(x_TI, scales_TC, weight_OI, scales_LB, num_rows, torch.bfloat16)
    recipes = F.ScalingType
    y_TO = F.scaled_mm(
        x_TI,
        weight_OI.t(),
        scales_TC,
        recipes.BlockWise1x128,
        scales_LB,
        recipes.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return y_TO[:num_rows]


@multiply_blocks.register_fake
def _(x_TI: Tensor, scales_TC: Tensor, weight_OI: Tensor, scales_LB: Tensor, num_rows: int) -> Tensor:
    return x_TI.new_empty((num_rows, weight_OI.shape[0]), dtype=torch.bfloat16)


class Fp8BlockWeight:
    """W[O, I] in float8, with a scale per block; a ``RoundingWeight``."""

    input_group = GROUP

    def __init__(self, weight_OI: Tensor) -> None:
        self.input_width = weight_OI.shape[1]
        self._weight_OI, scales_BC = in_blocks(weight_OI)
        scales_BL = F.pad(scales_BC, (0, -scales_BC.shape[1] % SCALES_MULTIPLE))
        self._scales_LB = scales_BL.contiguous().t()
        self.nbytes = self._weight_OI.nbytes + self._scales_LB.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if not len(x_TI):
            return x_TI.new_empty((0, len(self._weight_OI)), dtype=torch.bfloat16)
        rounded_TI, scales_TC, num_rows = _in_groups(x_TI)
        y_TO = multiply_blocks(rounded_TI, scales_TC, self._weight_OI, self._scales_LB, num_rows)
        return y_TO if bias_O is None else y_TO.add_(bias_O)


def _in_groups(x_TI: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return rounded rows, their scales, and the number of rows."""
    if isinstance(x_TI, RoundedRows):
        return x_TI, x_TI.scales_TG, x_TI.num_rows
    return *round_rows(x_TI, GROUP), len(x_TI)


class Float8Blocks:
    """A kernel that rounds every weight to float8, except those of odd sizes, which the product does not support."""

    element_bytes = FLOAT8.itemsize

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in float8 blocks, or None if its size is not supported."""
        outputs, inputs = weight_OI.shape
        return None if outputs % MULTIPLE or inputs % GROUP else Fp8BlockWeight(weight_OI)


def try_out(device: torch.device) -> None:
    """Multiply once with different scales.  Raises PluginError if torch cannot, or the result is wrong."""
    try:
        with torch.inference_mode():
            scales_O1 = torch.logspace(-2, 2, 2 * GROUP, device=device)[:, None]
            weight_OI = scales_O1.expand(-1, 3 * GROUP).bfloat16()
            x_TI = torch.logspace(-3, 3, 3 * GROUP, device=device).expand(5, -1).bfloat16()
            found_TO = Fp8BlockWeight(weight_OI)(x_TI, None).double()
            expected_TO = x_TI.double() @ weight_OI.double().t()
        error = float((found_TO - expected_TO).norm() / expected_TO.norm())
        problem = f"a product is off by {error:.2g} of its size" if not error <= TRIAL_ERROR else ""
    except Exception as reason:  # torch before CUDA 12.9, or a GPU other than Hopper
        problem = " ".join(f"{type(reason).__name__}: {reason}".split())[:300]
    if problem:
        raise PluginError(
            f"{PLUGIN} needs a Hopper GPU and a torch for CUDA 12.9 or later ({problem}); "
            "set plugins.linear=torch_fp8, which has a scale per output, or model.quantization=none"
        )


@hookimpl
def callboard_linear(context: LinearContext) -> Float8Blocks:
    """Build the kernel of torch's float8 products with block scales.  Raises PluginError unless the GPU is a Hopper."""
    decode_options(PLUGIN, context.options, Options)
    if context.device == "cuda":
        try_out(torch.device(context.device))
    return Float8Blocks()
