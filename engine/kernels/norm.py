"""Residual add and root-mean-square normalisation in one launch.

Legend: T tokens · D model dim · K parts of an update
Owns: one pass over the residual stream where torch makes two.  Does not know: which layer is normalised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

MAX_WIDTH = 1 << 15  # a row is held in registers


def add_norm(x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add ``update`` to x in place; return x / sqrt(mean(x^2) + eps) * weight of the sum, in x's dtype.

    update: [T, D]; or [T, K, D], whose parts are summed in order in float32, and the sum rounded to x's dtype.
    All are of one floating-point dtype, but the weight may be float32; rows are contiguous, D is up to MAX_WIDTH.  The
    mean is float32, of the sum as it is stored, so that the result fits the residual stream.
    """
    assert update_TD is not None, "a GPU's kernels add"
    num_tokens, width = x_TD.shape
    assert x_TD.is_contiguous(), "the residual stream is written in place"
    assert width <= MAX_WIDTH, f"a row of {width} numbers is more than a program holds"
    y_TD = torch.empty_like(x_TD)
    if num_tokens:
        block = triton.next_power_of_2(width)
        add_norm_rows[(num_tokens,)](
            x_TD, update_TD.contiguous(), weight_D, y_TD, eps,
            WIDTH=width, BLOCK_D=block, PARTS=update_TD.shape[1] if update_TD.dim() == 3 else 1,
            num_warps=min(16, max(1, block // 256)), enable_fp_fusion=True, **launch_options(x_TD.device),
        )  # fmt: skip
    return y_TD


@triton.jit
def add_norm_rows(
    x, update, weight, out, eps,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one row per program."""
    at = tl.program_id(0).to(tl.int64) * WIDTH
    d_D = tl.arange(0, BLOCK_D)
    live_D = d_D < WIDTH
    weight_D = tl.load(weight + d_D, mask=live_D, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    if PARTS == 1:
        norm_D = sum_and_norm(x + at, update + at, weight_D, d_D, live_D, eps, WIDTH)
    else:
        sum_D = tl.zeros([BLOCK_D], tl.float32)
        for part in tl.static_range(PARTS):
            sum_D += tl.load(update + at * PARTS + part * WIDTH + d_D, mask=live_D, other=0.0).to(tl.float32)
        sum_D = sum_D.to(x.dtype.element_ty).to(tl.float32)
        norm_D = normed_sum(x + at, sum_D, weight_D, d_D, live_D, eps, WIDTH)
    tl.store(out + at + d_D, norm_D.to(out.dtype.element_ty), mask=live_D)


@triton.jit
def sum_and_norm(x, update, weight_D, d_D, live_D, eps, WIDTH: tl.constexpr):
    """Add ``update`` to one row of x and return the sum's norm in float32.  d_D: its indices, in any shape."""
    update_D = tl.load(update + d_D, mask=live_D, other=0.0).to(tl.float32)
    return normed_sum(x, update_D, weight_D, d_D, live_D, eps, WIDTH)


@triton.jit
def normed_sum(x, update_D, weight_D, d_D, live_D, eps, WIDTH: tl.constexpr):
    """Add an update that registers hold to one row of x and return the sum's norm in float32."""
    before_D = tl.load(x + d_D, mask=live_D, other=0.0).to(tl.float32)
    stored_D = (before_D + update_D).to(x.dtype.element_ty)
    tl.store(x + d_D, stored_D, mask=live_D)
    sum_D = stored_D.to(tl.float32)
    return sum_D * tl.rsqrt(tl.sum(sum_D * sum_D) / WIDTH + eps) * weight_D
