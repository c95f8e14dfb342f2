"""The products of adapters in two launches per linear layer, however many adapters a batch has.

Legend: T rows of the input · S slots · P matrices that are merged into the product · R rank of a slot
        I input features · O output features of all matrices · M rows, C inputs and N outputs of a tile
Owns: the two kernels and their launches.  Does not know: which adapter is in a slot.

A program multiplies a tile of rows by the matrices of one slot, the i-th that is among the tile's rows, and writes the
rows of that slot alone.  The launches depend on the number of rows only, so a captured one may be replayed with other
slots; a tile whose rows have fewer slots than programs leaves the rest with nothing to do.  Slots and
matrices are written before the step's layers, and launches that wait lie between, so a program reads both before it
waits for the kernel in front of it.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.products import multiply

ROWS: Final = 16  # of a tile: the least that tensor cores support
WIDE_ROWS: Final = 64  # of a tile of a prompt, whose rows have one slot as a rule
INPUTS_AT_ONCE: Final = 128
FEW_ROWS_INPUTS: Final = (512, 256)  # of a tile of few rows, ranks up to 16 and beyond: each tile is a trip to memory
OUTPUTS_AT_ONCE: Final = 128
RANKS_AT_ONCE: Final = 64


def output_tiles(outputs: list[int], device: torch.device) -> Tensor:
    """Return (matrix, first output, end) of each tile of outputs, int32: none is of two matrices."""
    tiles, end = [], 0
    for matrix, size in enumerate(outputs):
        first, end = end, end + size
        tiles += [(matrix, at, end) for at in range(first, end, OUTPUTS_AT_ONCE)]
    return torch.tensor(tiles, dtype=torch.int32, device=device)


def add_adapters(y_TO: Tensor, x_TI: Tensor, slots_T: Tensor, a_SPRI: Tensor, b_SRO: Tensor, tiles: Tensor) -> Tensor:
    """Add B A x of each row's slot to y, in place, and return y.

    slots: int64, below 0 for rows without an adapter.  tiles: of ``output_tiles``.
    A x is rounded to x's dtype; sums are float32."""
    (num_rows, inputs), (num_slots, matrices, rank, _) = x_TI.shape, a_SPRI.shape
    assert y_TO.stride(1) == 1, "outputs of a row must be adjacent"
    assert len(slots_T) == num_rows, f"{num_rows} rows, {len(slots_T)} slots"
    if not num_rows:
        return y_TO
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    h_TPR = torch.empty((num_rows, matrices, rank), dtype=x_TI.dtype, device=x_TI.device)
    rows = ROWS if num_rows <= 256 else WIDE_ROWS
    block_rank = min(RANKS_AT_ONCE, max(16, triton.next_power_of_2(rank)))
    grid = (triton.cdiv(num_rows, rows), min(rows, num_slots))
    wide = min(FEW_ROWS_INPUTS[block_rank > 16], triton.next_power_of_2(max(INPUTS_AT_ONCE, inputs)))
    shared = {
        "MATRICES": matrices, "RANK": rank, "BLOCK_M": rows, "BLOCK_R": block_rank,
        "num_warps": 4 if rows == ROWS else 8, "INTERPRETED": x_TI.device.type == "cpu", "enable_fp_fusion": True,
        **launch_options(x_TI.device),
    }  # fmt: skip
    reduce_inputs[(*grid, matrices * triton.cdiv(rank, block_rank))](
        x_TI, slots_T, a_SPRI, h_TPR, num_rows, x_TI.stride(0), INPUTS=inputs,
        BLOCK_C=wide if rows == ROWS else INPUTS_AT_ONCE, num_stages=2, **shared,
    )  # fmt: skip
    expand_outputs[(*grid, len(tiles))](
        h_TPR, slots_T, b_SRO, tiles, y_TO, num_rows, y_TO.stride(0), WIDTH=b_SRO.shape[-1], BLOCK_N=OUTPUTS_AT_ONCE,
        num_stages=2, **shared,
    )  # fmt: skip
    return y_TO


@triton.jit
def choose_slot(slot_M, index, BLOCK_M: tl.constexpr):
    """Return the slot that is the index-th among those of some rows, in the order of their first rows; -1 for none."""
    m_M = tl.arange(0, BLOCK_M)
    row_MM = tl.where(slot_M[:, None] == slot_M[None, :], m_M[None, :], BLOCK_M)
    is_first_M = (slot_M >= 0) & (tl.min(row_MM, 1) == m_M)
    place_M = tl.cumsum(is_first_M.to(tl.int32), 0) - 1
    return tl.max(tl.where(is_first_M & (place_M == index), slot_M, -1), 0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def reduce_inputs(
    x, slots, a, h, num_rows, x_stride,
    INPUTS: tl.constexpr, MATRICES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write h = A x of a tile of rows, for one slot, one matrix and some of its rank."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot_M = tl.load(slots + row_M, mask=row_M < num_rows, other=-1).to(tl.int32)
    slot = choose_slot(slot_M, tl.program_id(1), BLOCK_M)
    blocks = (RANK + BLOCK_R - 1) // BLOCK_R
    matrix = tl.program_id(2) // blocks
    r_R = (tl.program_id(2) % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    live_M, live_R = slot_M == slot, (r_R < RANK) & (slot >= 0)
    a_R = a + ((slot.to(tl.int64) * MATRICES + matrix) * RANK + r_R) * INPUTS
    c_C = tl.arange(0, BLOCK_C)
    a_RC = tl.load(a_R[:, None] + c_C[None, :], mask=live_R[:, None] & (c_C < INPUTS)[None, :], other=0.0)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    if slot >= 0:
        x_M = x + row_M.to(tl.int64) * x_stride
        x_MC = tl.load(x_M[:, None] + c_C[None, :], mask=live_M[:, None] & (c_C < INPUTS)[None, :], other=0.0)
        sums_MR = multiply(x_MC, tl.trans(a_RC), tl.zeros([BLOCK_M, BLOCK_R], tl.float32), INTERPRETED)
        for first in range(BLOCK_C, INPUTS, BLOCK_C):
            live_C = first + c_C < INPUTS
            x_MC = tl.load(x_M[:, None] + (first + c_C)[None, :], mask=live_M[:, None] & live_C[None, :], other=0.0)
            a_RC = tl.load(a_R[:, None] + (first + c_C)[None, :], mask=live_R[:, None] & live_C[None, :], other=0.0)
            sums_MR = multiply(x_MC, tl.trans(a_RC), sums_MR, INTERPRETED)
        h_MR = h + (row_M.to(tl.int64) * MATRICES + matrix)[:, None] * RANK + r_R[None, :]
        tl.store(h_MR, sums_MR.to(h.dtype.element_ty), mask=live_M[:, None] & live_R[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def expand_outputs(
    h, slots, b, tiles, y, num_rows, y_stride,
    WIDTH: tl.constexpr, MATRICES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add B h to a tile of rows and outputs, for one slot."""
    matrix = tl.load(tiles + 3 * tl.program_id(2))
    o_N = tl.load(tiles + 3 * tl.program_id(2) + 1) + tl.arange(0, BLOCK_N)
    live_N = o_N < tl.load(tiles + 3 * tl.program_id(2) + 2)
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot_M = tl.load(slots + row_M, mask=row_M < num_rows, other=-1).to(tl.int32)
    slot = choose_slot(slot_M, tl.program_id(1), BLOCK_M)
    r_R = tl.arange(0, BLOCK_R)
    b_R = b + (slot.to(tl.int64) * RANK + r_R) * WIDTH
    b_RN = tl.load(b_R[:, None] + o_N[None, :], mask=((r_R < RANK) & (slot >= 0))[:, None] & live_N[None, :], other=0.0)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    if slot >= 0:
        live_M = slot_M == slot
        h_M = h + (row_M.to(tl.int64) * MATRICES + matrix) * RANK
        y_MN = y + row_M.to(tl.int64)[:, None] * y_stride + o_N[None, :]
        live_MN = live_M[:, None] & live_N[None, :]
        sums_MN = tl.load(y_MN, mask=live_MN, other=0.0).to(tl.float32)
        h_MR = tl.load(h_M[:, None] + r_R[None, :], mask=live_M[:, None] & (r_R < RANK)[None, :], other=0.0)
        sums_MN = multiply(h_MR, b_RN, sums_MN, INTERPRETED)
        for first in range(BLOCK_R, RANK, BLOCK_R):
            live_R = first + r_R < RANK
            h_MR = tl.load(h_M[:, None] + (first + r_R)[None, :], mask=live_M[:, None] & live_R[None, :], other=0.0)
            b_RN = tl.load(
                b_R[:, None] + first * WIDTH + o_N[None, :], mask=live_R[:, None] & live_N[None, :], other=0.0
            )
            sums_MN = multiply(h_MR, b_RN, sums_MN, INTERPRETED)
        tl.store(y_MN, sums_MN.to(y.dtype.element_ty), mask=live_MN)
