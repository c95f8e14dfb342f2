"""Rounding of rows to float8 (e4m3) in one launch, alone, together with a residual add and a norm, or with a gate.

Legend: T rows · I features · D model dim · G groups of a row that have a scale each
Owns: one pass over the rows.  Does not know: products, weights.  ``float8.py`` computes the same in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import float8
from engine.kernels.activation import COLUMNS, KINDS, activated
from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.norm import sum_and_norm

LARGEST = tl.constexpr(float8.LARGEST)
SMALLEST = tl.constexpr(float8.SMALLEST)
MAX_WIDTH = 1 << 15  # a row is held in registers


def round_rows(x_TI: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Return what ``float8.rounded`` returns.  x_TI: any float dtype and any strides, at most MAX_WIDTH wide; rows that
    are not contiguous are copied.  group: a power of two, or 0."""
    num_rows, width = x_TI.shape
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    rounded_TI, scales_TG = _outputs(x_TI, group)
    if num_rows:
        round_row[(num_rows,)](
            x_TI, rounded_TI, scales_TG, x_TI.stride(0), *scales_TG.stride(),
            WIDTH=width, **_constants(x_TI, group),
        )  # fmt: skip
    return rounded_TI, scales_TG


def add_norm_round(
    x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float, group: int = 0
) -> tuple[Tensor, Tensor]:
    """Add ``update`` to x in place and return ``norm.add_norm``'s result, rounded as by ``round_rows``."""
    num_rows, width = x_TD.shape
    assert x_TD.is_contiguous(), "the residual stream is written in place"
    rounded_TD, scales_TG = _outputs(x_TD, group)
    if num_rows:
        add_norm_round_row[(num_rows,)](
            x_TD, update_TD.contiguous(), weight_D, rounded_TD, scales_TG, eps, *scales_TG.stride(),
            WIDTH=width, **_constants(x_TD, group),
        )  # fmt: skip
    return rounded_TD, scales_TG


def gated_round(gate_up_T2I: Tensor, kind: str = "silu", group: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``activation.gated``'s result, rounded as by ``round_rows``."""
    num_rows, both = gate_up_T2I.shape
    assert gate_up_T2I.is_contiguous(), "gate and up must be contiguous"
    gate_TI = gate_up_T2I[:, : both // 2]
    rounded_TI, scales_TG = _outputs(gate_TI, group)
    if num_rows:
        constants = _constants(gate_TI, group)
        if group:  # groups of a row are independent of each other
            constants["BLOCK_G"] = min(constants["BLOCK_G"], max(1, COLUMNS // group))
            constants["num_warps"] = min(constants["num_warps"], max(1, COLUMNS // 256))
        per_row = triton.cdiv(both // 2, constants["BLOCK_G"] * constants["GROUP"])
        gate_round_groups[(num_rows * per_row,)](
            gate_up_T2I, rounded_TI, scales_TG, *scales_TG.stride(),
            WIDTH=both // 2, KIND=KINDS[kind], PROGRAMS=per_row, **constants,
        )  # fmt: skip
    return rounded_TI, scales_TG


def _outputs(x_TI: Tensor, group: int) -> tuple[Tensor, Tensor]:
    num_rows, width = x_TI.shape
    assert width <= MAX_WIDTH, f"a row of {width} numbers is more than a program holds"
    assert group == 0 or width % group == 0, f"a row of {width} numbers is not made of groups of {group}"
    rows = float8.num_rounded(num_rows, group)
    rounded_TI = torch.empty((rows, width), dtype=float8.FLOAT8, device=x_TI.device)
    scales_GT = torch.empty((width // group if group else 1, rows), dtype=torch.float32, device=x_TI.device)
    return rounded_TI, scales_GT.t() if group else scales_GT.view(rows, 1)


def _constants(x_TI: Tensor, group: int) -> dict[str, int]:
    block = triton.next_power_of_2(x_TI.shape[1])
    return {
        "GROUP": group or block,
        "BLOCK_G": max(1, block // group) if group else 1,
        "num_warps": min(16, max(1, block // 256)),
        "enable_fp_fusion": True,
        **launch_options(x_TI.device),
    }


@triton.jit
def store_rounded(x_GI, place_GI, live_GI, out, scales, group_stride, first, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Store groups of one row, given in float32, and their scales.  first: number of the first group."""
    # The divisions are torch's, so that both round alike.
    largest_G = tl.maximum(tl.max(tl.abs(x_GI), 1), SMALLEST)
    scale_G = tl.div_rn(largest_G, tl.zeros_like(largest_G) + LARGEST)
    rounded_GI = tl.div_rn(x_GI, tl.zeros_like(x_GI) + scale_G[:, None])
    tl.store(out + place_GI, rounded_GI.to(out.dtype.element_ty), mask=live_GI)
    g_G = first + tl.arange(0, x_GI.shape[0])
    tl.store(scales + g_G * group_stride, scale_G, mask=g_G * GROUP < WIDTH)


@triton.jit(do_not_specialize=["group_stride"])
def round_row(
    x, out, scales, stride, row_stride, group_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one row per program."""
    row = tl.program_id(0).to(tl.int64)
    place_GI = tl.arange(0, BLOCK_G)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live_GI = place_GI < WIDTH
    wait_for_previous(PDL)
    let_next_begin(PDL)
    x_GI = tl.load(x + row * stride + place_GI, mask=live_GI, other=0.0).to(tl.float32)
    store_rounded(x_GI, place_GI, live_GI, out + row * WIDTH, scales + row * row_stride, group_stride, 0, GROUP, WIDTH)


@triton.jit(do_not_specialize=["group_stride"])
def add_norm_round_row(
    x, update, weight, out, scales, eps, row_stride, group_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one row per program."""
    row = tl.program_id(0).to(tl.int64)
    place_GD = tl.arange(0, BLOCK_G)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live_GD = place_GD < WIDTH
    weight_GD = tl.load(weight + place_GD, mask=live_GD, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    norm_GD = sum_and_norm(x + row * WIDTH, update + row * WIDTH, weight_GD, place_GD, live_GD, eps, WIDTH)
    # Rounded as the norm alone would be stored, so that both ways round the same numbers to float8.
    norm_GD = norm_GD.to(x.dtype.element_ty).to(tl.float32)
    store_rounded(
        norm_GD, place_GD, live_GD, out + row * WIDTH, scales + row * row_stride, group_stride, 0, GROUP, WIDTH
    )


@triton.jit(do_not_specialize=["group_stride"])
def gate_round_groups(
    gate_up, out, scales, row_stride, group_stride,
    WIDTH: tl.constexpr, KIND: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Process some groups of one row per program."""
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    first = (tl.program_id(0) % PROGRAMS) * BLOCK_G
    place_GI = (first + tl.arange(0, BLOCK_G))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live_GI = place_GI < WIDTH
    wait_for_previous(PDL)
    let_next_begin(PDL)
    gate_GI = tl.load(gate_up + row * (2 * WIDTH) + place_GI, mask=live_GI, other=0.0).to(tl.float32)
    up_GI = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + place_GI, mask=live_GI, other=0.0).to(tl.float32)
    # Rounded as the gate alone would be stored, so that both ways round the same numbers to float8.
    gated_GI = (activated(gate_GI, KIND) * up_GI).to(gate_up.dtype.element_ty).to(tl.float32)
    store_rounded(
        gated_GI, place_GI, live_GI, out + row * WIDTH, scales + row * row_stride, group_stride, first, GROUP, WIDTH
    )
