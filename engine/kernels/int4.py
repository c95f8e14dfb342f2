"""Products with weights of 4 bits, of which 32 inputs of an output share a scale and a zero point.

Legend: T rows of the input · I input features · O output features · G groups of 32 inputs · B bytes of a row of the
        weight, I / 2 · M rows of a tile · N outputs of a tile · P blocks of a tile · J inputs of a group
Owns: the layout, one launch for few rows and one for some, the weight in 16 bits for many.  Does not know: layers.

A block of 64 inputs is 32 bytes: the lower halves are its first 32 inputs, the upper ones the others.  So neighbouring
bytes belong to one group, and to neighbouring inputs.  An element is scale * (q - 8) + zero, q from 0 to 15.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.products import multiply

GROUP: Final = 32
BLOCK: Final = 2 * GROUP
MIDDLE: Final = 8
FEW_ROWS: Final = 4  # are multiplied as vectors
SOME_ROWS: Final = 64  # are multiplied in one tile; for more, writing and reading the weight in 16 bits costs less
COLUMNS: Final = 8  # outputs of a program that multiplies few rows
WIDEST_TILE: Final = 32  # blocks, 2,048 inputs
OUTPUTS: Final = 32  # of a tile for some rows
TILE_BYTES: Final = 64  # of an output in a tile for some rows: 128 inputs


class Nibbles(NamedTuple):
    """A weight.  bytes: uint8, [O, B].  scales, zeros: [O, G], of any floating-point types.  All are contiguous."""

    bytes_OB: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor


def pack_nibbles(integers_OI: Tensor) -> Tensor:
    """Return integers from 0 to 15 as bytes, [O, B].  I is a multiple of BLOCK."""
    halves = integers_OI.to(torch.uint8).unflatten(1, (-1, 2, GROUP))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def multiply_nibbles(x_TI: Tensor, weight: Nibbles) -> Tensor:
    """Return x W^T, [T, O] in x's dtype, summed in float32.  T: up to SOME_ROWS; I: a multiple of BLOCK."""
    (num_rows, inputs), outputs = x_TI.shape, len(weight.bytes_OB)
    assert num_rows <= SOME_ROWS, f"{num_rows} rows, at most {SOME_ROWS}"
    x_TI = x_TI.contiguous()
    y_TO = torch.empty((num_rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not num_rows:
        return y_TO
    if num_rows <= FEW_ROWS:
        few_by_nibbles[(triton.cdiv(outputs, COLUMNS),)](
            x_TI, *weight, y_TO, BLOCKS=inputs // BLOCK, WIDTH=outputs, ROWS=num_rows, BLOCK_N=COLUMNS,
            BLOCK_P=min(WIDEST_TILE, triton.next_power_of_2(inputs // BLOCK)),
            num_warps=8, enable_fp_fusion=True, **launch_options(x_TI.device),
        )  # fmt: skip
    else:
        some_by_nibbles[(triton.cdiv(outputs, OUTPUTS),)](
            x_TI, *weight, y_TO, num_rows, BYTES=inputs // 2, WIDTH=outputs,
            BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=OUTPUTS, BLOCK_B=TILE_BYTES,
            INTERPRETED=x_TI.device.type == "cpu", num_warps=4, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
    return y_TO


def widen_nibbles(weight: Nibbles, dtype: torch.dtype) -> Tensor:
    """Return the weight as floats, [O, I]."""
    outputs, num_bytes = weight.bytes_OB.shape
    wide_OI = torch.empty((outputs, 2 * num_bytes), dtype=dtype, device=weight.bytes_OB.device)
    block = min(1024, triton.next_power_of_2(num_bytes))
    widen_row[(outputs, triton.cdiv(num_bytes, block))](*weight, wide_OI, BYTES=num_bytes, BLOCK_B=block, num_warps=4)
    return wide_OI


@triton.jit
def few_by_nibbles(
    x, nibbles, scales, zeros, out,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of every row per program, as ``few_rows.multiply_rows`` does."""
    o_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_N = o_N < WIDTH
    p_P = tl.arange(0, BLOCK_P)
    j_J = tl.arange(0, 32)
    r_R = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    wait_for_previous(PDL)
    let_next_begin(PDL)
    sum_RN = tl.zeros([triton.next_power_of_2(ROWS), BLOCK_N], tl.float32)
    for first in range(0, BLOCKS, BLOCK_P):
        b_P = first + p_P
        live_P = b_P < BLOCKS
        at_NP = o_N.to(tl.int64)[:, None] * BLOCKS + b_P[None, :]
        live_NP = live_N[:, None] & live_P[None, :]
        byte_NPJ = tl.load(nibbles + at_NP[:, :, None] * 32 + j_J[None, None, :], mask=live_NP[:, :, None], other=0)
        for half in tl.static_range(2):
            q_NPJ = ((byte_NPJ >> (4 * half)) & 15).to(tl.float32) - 8.0
            scale_NP = tl.load(scales + at_NP * 2 + half, mask=live_NP, other=0.0).to(tl.float32)
            zero_NP = tl.load(zeros + at_NP * 2 + half, mask=live_NP, other=0.0).to(tl.float32)
            i_PJ = b_P[:, None] * 64 + half * 32 + j_J[None, :]
            for row in tl.static_range(ROWS):
                x_PJ = tl.load(x + row * (BLOCKS * 64) + i_PJ, mask=live_P[:, None], other=0.0).to(tl.float32)
                part_NP = tl.sum(q_NPJ * x_PJ[None, :, :], 2) * scale_NP + tl.sum(x_PJ, 1)[None, :] * zero_NP
                sum_RN += tl.where(r_R == row, tl.sum(part_NP, 1)[None, :], 0.0)
    at_RN = out + r_R * WIDTH + o_N[None, :]
    tl.store(at_RN, sum_RN.to(out.dtype.element_ty), mask=(r_R < ROWS) & live_N[None, :])


@triton.jit
def widened(nibbles, scales, zeros, row, b_B, live, BYTES: tl.constexpr, HALF: tl.constexpr):
    """Return one half of each byte as a number in float32.  row, b_B: of the bytes, in shapes that broadcast."""
    byte = tl.load(nibbles + row * BYTES + b_B, mask=live, other=0)
    group = row * (BYTES // 16) + b_B // 32 * 2 + HALF
    scale = tl.load(scales + group, mask=live, other=0.0).to(tl.float32)
    zero = tl.load(zeros + group, mask=live, other=0.0).to(tl.float32)
    return (((byte >> (4 * HALF)) & 15).to(tl.float32) - 8.0) * scale + zero


@triton.jit
def input_of(b_B, HALF: tl.constexpr):
    """Return the input that one half of each byte belongs to."""
    return b_B // 32 * 64 + b_B % 32 + HALF * 32


@triton.jit(do_not_specialize=["num_rows"])
def some_by_nibbles(
    x, nibbles, scales, zeros, out, num_rows,
    BYTES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of all rows per program."""
    t_M = tl.arange(0, BLOCK_M)
    o_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_M1, live_N1 = (t_M < num_rows)[:, None], (o_N < WIDTH)[:, None]
    row_M1, row_N1 = x + t_M[:, None] * (2 * BYTES), o_N.to(tl.int64)[:, None]
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, BYTES, BLOCK_B):
        b_1B = (first + tl.arange(0, BLOCK_B))[None, :]
        for half in tl.static_range(2):
            x_MB = tl.load(row_M1 + input_of(b_1B, half), mask=live_M1 & (b_1B < BYTES), other=0.0)
            wide_NB = widened(nibbles, scales, zeros, row_N1, b_1B, live_N1 & (b_1B < BYTES), BYTES, half)
            sum_MN = multiply(x_MB, tl.trans(wide_NB.to(x.dtype.element_ty)), sum_MN, INTERPRETED)
    at_MN = out + t_M[:, None] * WIDTH + o_N[None, :]
    tl.store(at_MN, sum_MN.to(out.dtype.element_ty), mask=live_M1 & (o_N < WIDTH)[None, :])


@triton.jit
def widen_row(nibbles, scales, zeros, out, BYTES: tl.constexpr, BLOCK_B: tl.constexpr):
    """Write a part of one output's elements per program."""
    row = tl.program_id(0).to(tl.int64)
    b_B = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    for half in tl.static_range(2):
        wide_B = widened(nibbles, scales, zeros, row, b_B, b_B < BYTES, BYTES, half)
        tl.store(out + row * (2 * BYTES) + input_of(b_B, half), wide_B.to(out.dtype.element_ty), mask=b_B < BYTES)
