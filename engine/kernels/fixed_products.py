"""Products with weights whose bits do not depend on the number of rows.

Legend: T rows of the input · I input features · O output features · M rows of a tile · N outputs of a tile
        C inputs of a tile
Owns: one size of tiles for every number of rows; weights are of x's type, or int8 with a scale per output.
Does not know: layers, callers.

Libraries choose another kernel for a few rows than for many, or divide a sum among processors, so that a row's result
depends on the rows next to it.  Here one program adds up each result over input tiles of one size in order, by
instructions of one shape, wherever in its tile the row is.  Missing rows are computed as zeros: a decode step of few
rows waits for its weights anyway.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.products import multiply

ROWS: Final = 64  # the fewest that a warp group of Hopper takes
OUTPUTS: Final = 32  # few, so that a weight of 1,024 outputs still keeps 32 processors busy
INPUT_BYTES: Final = 256  # of a row of a tile
ALIGNMENT: Final = 16  # bytes of one load
INTERPRETED_ROWS: Final = 16  # enough for the interpreter, which has no tensor cores


def fixed_product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scales_O: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, [T, O] in x's dtype, summed in float32 and rounded once.  weight, bias: in x's dtype.

    x may have gaps between its rows, and no rows; the weight is contiguous.
    scales_O: scales of the rows of an int8 weight, in x's dtype."""
    (num_rows, inputs), outputs = x_TI.shape, len(weight_OI)
    assert weight_OI.is_contiguous(), "a weight must be contiguous"
    expected = x_TI.dtype if scales_O is None else torch.int8
    assert weight_OI.dtype == expected, f"{x_TI.dtype} is multiplied by {weight_OI.dtype}"
    y_TO = torch.empty((num_rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not num_rows:
        return y_TO
    x_TI = x_TI.contiguous()
    if x_TI.data_ptr() % ALIGNMENT:  # another alignment would be another variant, with other loads
        x_TI = x_TI.clone()
    interpreted = x_TI.device.type == "cpu"
    rows = INTERPRETED_ROWS if interpreted else ROWS
    multiply_tiles[(triton.cdiv(num_rows, rows), triton.cdiv(outputs, OUTPUTS))](
        x_TI, weight_OI, bias_O, scales_O, y_TO, num_rows,
        INPUTS=inputs, WIDTH=outputs, BIASED=bias_O is not None, SCALED=scales_O is not None,
        BLOCK_M=rows, BLOCK_N=OUTPUTS, BLOCK_C=INPUT_BYTES // x_TI.element_size(), INTERPRETED=interpreted,
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y_TO


# No property of the rows may make another variant, which might have other bits.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["bias", "scales"])
def multiply_tiles(
    x, weight, bias, scales, out, num_rows,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute tile j of the outputs for tile i of the rows, program (i, j); neighbours read the same weights."""
    t_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_M1, live_N1 = (t_M < num_rows)[:, None], (o_N < WIDTH)[:, None]
    row_M1, row_N1 = t_M.to(tl.int64)[:, None] * INPUTS, o_N.to(tl.int64)[:, None] * INPUTS
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INPUTS, BLOCK_C):
        i_C = first + tl.arange(0, BLOCK_C)
        live_1C = (i_C < INPUTS)[None, :]
        x_MC = tl.load(x + row_M1 + i_C[None, :], mask=live_M1 & live_1C, other=0.0)
        weight_NC = tl.load(weight + row_N1 + i_C[None, :], mask=live_N1 & live_1C, other=0)
        if SCALED:  # by way of float32: the interpreter would read an integer's bits as those of a bfloat16
            weight_NC = weight_NC.to(tl.float32).to(x.dtype.element_ty)
        sum_MN = multiply(x_MC, tl.trans(weight_NC), sum_MN, INTERPRETED)
    if SCALED:
        sum_MN *= tl.load(scales + o_N, mask=o_N < WIDTH, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        sum_MN += tl.load(bias + o_N, mask=o_N < WIDTH, other=0.0).to(tl.float32)[None, :]
    at_MN = out + t_M.to(tl.int64)[:, None] * WIDTH + o_N[None, :]
    tl.store(at_MN, sum_MN.to(out.dtype.element_ty), mask=live_M1 & (o_N < WIDTH)[None, :])
