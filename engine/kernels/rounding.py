"""Rows in float8 (e4m3), each with its own scale, in one launch: what products in float8 read.

Legend: T rows · I features
Owns: one pass over the rows.  Does not know: products, weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

FLOAT8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(torch.finfo(FLOAT8).max)
SMALLEST = tl.constexpr(1e-12)  # instead of 0 where all elements are, so that nothing is divided by it
MAX_WIDTH = 1 << 15  # a row is held in registers


def round_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8, [T, I] contiguous, and the float32 scales [T, 1] that give each its size back.

    x_TI: any float dtype and strides between rows; elements of a row side by side, at most MAX_WIDTH.
    """
    num_rows, width = x_TI.shape
    assert width <= MAX_WIDTH, f"a row of {width} numbers is more than a program holds"
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    rounded_TI = torch.empty((num_rows, width), dtype=FLOAT8, device=x_TI.device)
    scales_T1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TI.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        round_row[(num_rows,)](
            x_TI, rounded_TI, scales_T1, x_TI.stride(0),
            WIDTH=width, BLOCK_I=block,
            num_warps=min(16, max(1, block // 256)), enable_fp_fusion=True, **launch_options(x_TI.device),
        )  # fmt: skip
    return rounded_TI, scales_T1


@triton.jit
def round_row(x, out, scales, stride, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    i_I = tl.arange(0, BLOCK_I)
    live_I = i_I < WIDTH
    wait_for_previous(PDL)
    let_next_begin(PDL)
    x_I = tl.load(x + row * stride + i_I, mask=live_I, other=0.0).to(tl.float32)
    # Divided as torch divides, so that both round alike.
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x_I), 0), SMALLEST), LARGEST)
    rounded_I = tl.div_rn(x_I, tl.zeros([BLOCK_I], tl.float32) + scale)
    tl.store(out + row * WIDTH + i_I, rounded_I.to(out.dtype.element_ty), mask=live_I)
    tl.store(scales + row, scale)
