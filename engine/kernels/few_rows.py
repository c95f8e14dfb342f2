"""Products of a few rows with a weight, as fast as its bytes can be read.

Legend: T rows of the input · I input features · O output features · N outputs of a program · C inputs of a tile
        G groups of a row's inputs · B blocks of outputs, L groups of a weight, padded
Owns: one launch per product; weights are of x's type, int8 with a scale per output, or float8 with a scale per block.
Does not know: layers, callers.

With a few rows a product does nothing but read its weight.  Tensor cores want 16 rows or more, and libraries launch too
few programs for small weights.  Here a program multiplies a few outputs' whole rows as vectors: the weight is read by
many programs, each of which has much of it under way at once.  No kernel writes weights, so a program reads the first
tile of its own before it waits for the kernel in front of it.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.float8 import GROUP

MOST_ROWS: Final = 4  # each row multiplies a tile once more; with more rows tensor cores are faster
WIDEST_TILE: Final = 4096  # inputs
TILE: Final = 16_384  # elements that a program has under way: 64 for each of 256 threads
MOST_COLUMNS: Final = 8  # so that a weight of 1,024 outputs keeps 128 processors busy


def multiply_few(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scales_O: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, [T, O] in x's dtype, summed in float32 and rounded once.  T: up to MOST_ROWS.

    weight: contiguous, in x's dtype; or int8, with the scales of its rows in any dtype."""
    num_rows, outputs = len(x_TI), len(weight_OI)
    assert num_rows <= MOST_ROWS, f"{num_rows} rows, at most {MOST_ROWS}"
    assert weight_OI.is_contiguous(), "a weight must be contiguous"
    expected = x_TI.dtype if scales_O is None else torch.int8
    assert weight_OI.dtype == expected, f"{x_TI.dtype} is multiplied by {weight_OI.dtype}"
    x_TI = x_TI.contiguous()
    y_TO = torch.empty((num_rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not num_rows:
        return y_TO
    _launch(x_TI, weight_OI, y_TO, bias=bias_O, scales=scales_O)
    return y_TO


def multiply_few_blocks(
    x_TI: Tensor, scales_TG: Tensor, weight_OI: Tensor, scales_LB: Tensor, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """Return the first rows of (x scales) (W scales)^T, [num_rows, O] in ``dtype``.  num_rows: up to MOST_ROWS.

    x, weight: contiguous, float8.  Scales, float32 with adjacent columns, are those of GROUP inputs of a row of x, and
    of blocks of GROUP x GROUP of the weight."""
    assert 0 < num_rows <= min(MOST_ROWS, len(x_TI)), f"{num_rows} rows of {len(x_TI)}, at most {MOST_ROWS}"
    assert x_TI.is_contiguous(), "rows must be contiguous"
    assert weight_OI.is_contiguous(), "a weight must be contiguous"
    assert scales_TG.stride(0) == scales_LB.stride(0) == 1, "scales of a column must be adjacent"
    y_TO = torch.empty((num_rows, len(weight_OI)), dtype=dtype, device=x_TI.device)
    _launch(x_TI, weight_OI, y_TO, scales=scales_LB, x_scales=scales_TG)
    return y_TO


def _launch(
    x_TI: Tensor,
    weight_OI: Tensor,
    y_TO: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    x_scales: Tensor | None = None,
) -> None:
    """Launch a product.  x_scales: of rows in float8, whose weight has scales of blocks."""
    (outputs, inputs), in_blocks = weight_OI.shape, x_scales is not None
    tile = min(WIDEST_TILE, triton.next_power_of_2(inputs))
    columns = min(MOST_COLUMNS, TILE // tile)
    multiply_rows[(triton.cdiv(outputs, columns),)](
        x_TI, weight_OI, bias, scales, x_scales, y_TO,
        x_scales.stride(1) if x_scales is not None else 0, scales.stride(1) if in_blocks and scales is not None else 0,
        INPUTS=inputs, WIDTH=outputs, ROWS=len(y_TO), BIASED=bias is not None,
        SCALED=scales is not None and not in_blocks, GROUP=GROUP if in_blocks else 0,
        BLOCK_N=columns, BLOCK_C=tile, num_warps=8, enable_fp_fusion=True, **launch_options(x_TI.device),
    )  # fmt: skip


@triton.jit
def multiply_rows(
    x, weight, bias, scales, x_scales, out, x_stride, block_stride,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of every row per program; with a GROUP they have the scales of one block of outputs."""
    o_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_N = o_N < WIDTH
    c_C = tl.arange(0, BLOCK_C)
    r_R = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    row_N1 = weight + o_N.to(tl.int64)[:, None] * INPUTS
    weight_NC = tl.load(row_N1 + c_C[None, :], mask=live_N[:, None] & (c_C < INPUTS)[None, :], other=0.0)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    sum_RN = tl.zeros([triton.next_power_of_2(ROWS), BLOCK_N], tl.float32)
    for first in range(0, INPUTS, BLOCK_C):
        i_C = first + c_C
        wide_NC = weight_NC.to(tl.float32)
        if INPUTS > BLOCK_C:  # the next tile is under way while this one is multiplied
            next_C = i_C + BLOCK_C
            weight_NC = tl.load(row_N1 + next_C[None, :], mask=live_N[:, None] & (next_C < INPUTS)[None, :], other=0.0)
        if GROUP:
            block_C = scales + tl.program_id(0) * BLOCK_N // GROUP * block_stride + i_C // GROUP
            scale_C = tl.load(block_C, mask=i_C < INPUTS, other=0.0)
        for row in tl.static_range(ROWS):
            x_C = tl.load(x + row * INPUTS + i_C, mask=i_C < INPUTS, other=0.0).to(tl.float32)
            if GROUP:
                x_C *= scale_C * tl.load(x_scales + row + i_C // GROUP * x_stride, mask=i_C < INPUTS, other=0.0)
            part_N = tl.sum(wide_NC * x_C[None, :], 1)
            sum_RN += tl.where(r_R == row, part_N[None, :], 0.0)
    if SCALED:
        sum_RN *= tl.load(scales + o_N, mask=live_N, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        sum_RN += tl.load(bias + o_N, mask=live_N, other=0.0).to(tl.float32)[None, :]
    at_RN = out + r_R * WIDTH + o_N[None, :]
    tl.store(at_RN, sum_RN.to(out.dtype.element_ty), mask=(r_R < ROWS) & live_N[None, :])
