"""Products with weights in 4 bits as AWQ, GPTQ and compressed-tensors have them: a scale and a zero point per group.

Legend: T rows of the input · I input features · O output features · G groups of inputs with a scale of their own
        P pieces of inputs that lie together · B bytes of a piece · R rows of a tile of the weight
        M rows of a tile of the input
Owns: a product for a few rows, which reads the weight once, and the weight as floats.  Does not know: layers, files.

Codes less their zeros become numbers of x's type in registers, exactly: the bits of 128 + code in bfloat16, and of
1024 + code in float16, are those of 128 or 1024 with the code's as the last.  A tile of them is the first operand of a
product, which tensor cores of a Hopper GPU read from registers.  The sum over a group is scaled in float32: scales are
never rounded.  Those of the next group are read while one is multiplied.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.products import multiply
from engine.layers.packing import StoredRows
from engine.types.errors import WeightsError

MOST_ROWS: Final = 128  # for more, floats cost less (docs/performance.md)
TILE_ROWS: Final = 64  # of the weight: those of one instruction of tensor cores
PROGRAMS: Final = 1024  # that keep a GPU's memory busy; fewer tiles share the inputs of each
MOST_SHARES: Final = 16
CHEAP_SHARES: Final = 4
INPUTS_PER_ROW: Final = 32  # of a share, at least: what it writes costs as much to read as so many inputs
HEADER: Final = 3  # bytes of a group in a file's blocks before its codes: scale and zero
FORMATS: Final = {
    f"{name}{width}": (dtype, width)
    for name, dtype in (("HALF", torch.float16), ("UPPER", torch.bfloat16))
    for width in (32, 64, 128)
}


class Codes(NamedTuple):
    """W[O, I] in 4 bits.

    codes_POB: uint8; byte b of a piece of 2 B inputs has input b of its first half, and above it input b of its second.
    scales_GO: float16 or bfloat16.  zeros_GO: uint8, the code that stands for 0.
    arrived: int32 zeros, one per tile of TILE_ROWS rows; a product leaves them 0.  inputs: I."""

    codes_POB: Tensor
    scales_GO: Tensor
    zeros_GO: Tensor
    arrived: Tensor
    inputs: int

    @property
    def group(self) -> int:
        """Inputs of a group: 32, 64 or 128."""
        return self.inputs // len(self.scales_GO)


def arranged(rows: StoredRows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes_POB, scales_GO and zeros_GO of rows of blocks, on a device.  Raises WeightsError for NaN."""
    dtype, width = FORMATS[rows.format]
    outputs, num_groups = len(rows.blocks), rows.inputs // width
    blocks_OGB = rows.blocks.to(device).view(outputs, num_groups, HEADER + width // 2)
    scales_OG2 = blocks_OGB[:, :, :2].clone(memory_format=torch.contiguous_format)
    scales_GO = scales_OG2.flatten(1).view(dtype).t().contiguous()
    if not scales_GO.isfinite().all():
        raise WeightsError(f"{rows.where} contains NaN or infinity; the file is damaged")
    codes_OGB = blocks_OGB[:, :, HEADER:]
    codes_OI = torch.cat((codes_OGB & 15, codes_OGB >> 4), -1).flatten(1)
    piece = max(64, width)
    codes_OI = torch.nn.functional.pad(codes_OI, (0, -rows.inputs % piece))
    halves_OP2B = codes_OI.view(outputs, -1, 2, piece // 2)
    codes_POB = (halves_OP2B[:, :, 0] | halves_OP2B[:, :, 1] << 4).transpose(0, 1).contiguous()
    return codes_POB, scales_GO, blocks_OGB[:, :, 2].t().contiguous()


class FourBitWeight:
    """W[O, I] in the bytes of its file, as a linear layer multiplies by it."""

    def __init__(self, parts: Sequence[StoredRows], device: torch.device) -> None:
        """Copy the rows of all parts, which have one format, in their order.  Raises WeightsError for NaN."""
        codes, scales, zeros = zip(*(arranged(one, device) for one in parts), strict=True)
        codes_POB = torch.cat(codes, 1)
        arrived = torch.zeros(triton.cdiv(codes_POB.shape[1], TILE_ROWS), dtype=torch.int32, device=device)
        self._codes = Codes(codes_POB, torch.cat(scales, 1), torch.cat(zeros, 1), arrived, parts[0].inputs)
        self.nbytes = sum(one.nbytes for one in self._codes[:4])

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias."""
        if len(x_TI) <= MOST_ROWS:
            return multiply_four_bits(x_TI, self._codes, bias_O)
        return torch.nn.functional.linear(x_TI, self.floats(x_TI.dtype), bias_O)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as floats, [O, I]."""
        return widened(self._codes, dtype)


def multiply_four_bits(x_TI: Tensor, weight: Codes, bias_O: Tensor | None) -> Tensor:
    """Return x W^T + bias, [T, O] in x's dtype, summed in float32 and rounded once.  T: up to MOST_ROWS.

    x: bfloat16 or float16.  A row's bits depend on T by the size of a tile alone."""
    (num_rows, inputs), outputs = x_TI.shape, weight.codes_POB.shape[1]
    assert num_rows <= MOST_ROWS, f"{num_rows} rows, at most {MOST_ROWS}"
    assert inputs == weight.inputs, f"rows of {inputs} are multiplied by a weight of {weight.inputs} inputs"
    x_TI = x_TI.contiguous()
    y_TO = torch.empty((num_rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not num_rows:
        return y_TO
    columns = max(16, triton.next_power_of_2(num_rows))
    pieces, _, piece_bytes = weight.codes_POB.shape
    tiles = triton.cdiv(outputs, TILE_ROWS)
    cheap = max(CHEAP_SHARES, inputs // (INPUTS_PER_ROW * columns))
    most_shares = min(PROGRAMS // tiles, pieces, cheap, MOST_SHARES)
    per_share = triton.cdiv(pieces, max(1, most_shares))
    shares = triton.cdiv(pieces, per_share)
    parts = torch.empty((shares, tiles, TILE_ROWS, columns) if shares > 1 else 1, device=x_TI.device)
    multiply_coded_tiles[(tiles, shares)](
        x_TI, weight.codes_POB, weight.scales_GO, weight.zeros_GO, bias_O, y_TO, parts, weight.arrived, num_rows,
        INPUTS=inputs, WIDTH=outputs, GROUP=weight.group, PIECES=pieces, BYTES=piece_bytes, PER_SHARE=per_share,
        SHARES=shares, BIASED=bias_O is not None, BLOCK_R=TILE_ROWS, BLOCK_M=columns,
        INTERPRETED=x_TI.device.type == "cpu", num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y_TO


def widened(weight: Codes, dtype: torch.dtype) -> Tensor:
    """Return the weight as floats, [O, I] in ``dtype``: (code - zero) * scale in float32, rounded once."""
    pieces, outputs, piece_bytes = weight.codes_POB.shape
    out_OI = torch.empty((outputs, weight.inputs), dtype=dtype, device=weight.codes_POB.device)
    widen_tile[(triton.cdiv(outputs, TILE_ROWS), pieces)](
        weight.codes_POB, weight.scales_GO, weight.zeros_GO, out_OI,
        INPUTS=weight.inputs, WIDTH=outputs, GROUP=weight.group, BYTES=piece_bytes, BLOCK_R=TILE_ROWS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out_OI


@triton.jit
def times_codes(codes_RB, zero_R, x, at_M, live_M, c_B, sums_RM, INPUTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return sums + (codes - zeros) times one half of a piece's inputs of each row.  zeros: + what codes begin at."""
    if x.dtype.element_ty == tl.float16:
        wide_RB = (codes_RB | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
    elif INTERPRETED:
        wide_RB = ((codes_RB | 0x4300).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide_RB = (codes_RB | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    x_BM = tl.load(x + at_M[None, :] + c_B[:, None], mask=live_M[None, :] & (c_B < INPUTS)[:, None], other=0.0)
    return multiply(wide_RB - zero_R.to(wide_RB.dtype)[:, None], x_BM, sums_RM, INTERPRETED)


@triton.jit
def scales_of(scales, zeros, group, r_R, live_R, WIDTH: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr):
    """Return the scales of a group, and its zeros + FIRST, float32."""
    live_R = live_R & (group < GROUPS)
    scale_R = tl.load(scales + group * WIDTH + r_R, mask=live_R, other=0.0).to(tl.float32)
    return scale_R, tl.load(zeros + group * WIDTH + r_R, mask=live_R, other=0).to(tl.float32) + FIRST


# The number of rows must not make another variant beyond the sizes of tiles: compiling one takes a second.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_coded_tiles(
    x, codes, scales, zeros, bias, out, parts, arrived, num_rows,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr,
    PER_SHARE: tl.constexpr, SHARES: tl.constexpr, BIASED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of the weight's rows by a share of the inputs; the last program of a tile adds up its shares."""
    tile = tl.program_id(0)
    share = tl.program_id(1)
    r_R = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    live_R = r_R < WIDTH
    m_M = tl.arange(0, BLOCK_M)
    live_M = m_M < num_rows
    at_M = m_M * INPUTS
    b_B = tl.arange(0, BYTES)
    totals_RM = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    none_RM = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    per_piece: tl.constexpr = 2 * BYTES // GROUP
    groups: tl.constexpr = INPUTS // GROUP
    begin: tl.constexpr = 1024.0 if x.dtype.element_ty == tl.float16 else 128.0
    first = share * PER_SHARE
    scale_R, zero_R = scales_of(scales, zeros, per_piece * first, r_R, live_R, WIDTH, groups, begin)
    later_scale_R, later_zero_R = scale_R, zero_R
    if per_piece == 2:
        later_scale_R, later_zero_R = scales_of(scales, zeros, 2 * first + 1, r_R, live_R, WIDTH, groups, begin)
    for piece in range(first, min(first + PER_SHARE, PIECES)):
        at_RB = (piece * WIDTH + r_R).to(tl.int64)[:, None] * BYTES + b_B[None, :]
        byte_RB = tl.load(codes + at_RB, mask=live_R[:, None], other=0).to(tl.int16)
        following = per_piece * (piece + 1)
        next_scale_R, next_zero_R = scales_of(scales, zeros, following, r_R, live_R, WIDTH, groups, begin)
        c_B = 2 * BYTES * piece + b_B
        dot_RM = times_codes(byte_RB & 15, zero_R, x, at_M, live_M, c_B, none_RM, INPUTS, INTERPRETED)
        if per_piece == 2:
            totals_RM += scale_R[:, None] * dot_RM
            scale_R, zero_R, dot_RM = later_scale_R, later_zero_R, none_RM
            later_scale_R, later_zero_R = scales_of(scales, zeros, following + 1, r_R, live_R, WIDTH, groups, begin)
        upper_RB = (byte_RB >> 4) & 15
        dot_RM = times_codes(upper_RB, zero_R, x, at_M, live_M, c_B + BYTES, dot_RM, INPUTS, INTERPRETED)
        totals_RM += scale_R[:, None] * dot_RM
        scale_R, zero_R = next_scale_R, next_zero_R
    at_RM = tl.arange(0, BLOCK_R)[:, None] * BLOCK_M + m_M[None, :]
    if SHARES > 1:
        place = tile * (BLOCK_R * BLOCK_M)
        each = tl.num_programs(0) * (BLOCK_R * BLOCK_M)
        tl.store(parts + share * each + place + at_RM, totals_RM)
        tl.debug_barrier()  # every thread has stored before one of them counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SHARES - 1:
            return
        totals_RM = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for one in range(SHARES):  # in one order, so that a product has the same bits each time
            totals_RM += tl.load(parts + one * each + place + at_RM, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    if BIASED:
        totals_RM += tl.load(bias + r_R, mask=live_R, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + m_M[None, :] * WIDTH + r_R[:, None], totals_RM.to(out.dtype.element_ty),
        mask=live_R[:, None] & live_M[None, :],
    )  # fmt: skip


@triton.jit
def widen_tile(
    codes, scales, zeros, out,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the floats of one piece of inputs for some rows of the weight."""
    piece = tl.program_id(1)
    r_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live_R = r_R < WIDTH
    b_B = tl.arange(0, BYTES)
    at_RB = (piece * WIDTH + r_R).to(tl.int64)[:, None] * BYTES + b_B[None, :]
    byte_RB = tl.load(codes + at_RB, mask=live_R[:, None], other=0)
    for half in tl.static_range(2):
        first = (2 * piece + half) * BYTES
        group = first // GROUP
        scale_R, zero_R = scales_of(scales, zeros, group, r_R, live_R, WIDTH, INPUTS // GROUP, 0.0)
        code_RB = ((byte_RB >> (4 * half)) & 15).to(tl.float32)
        tl.store(
            out + r_R.to(tl.int64)[:, None] * INPUTS + first + b_B[None, :],
            ((code_RB - zero_R[:, None]) * scale_R[:, None]).to(out.dtype.element_ty),
            mask=live_R[:, None] & (first < INPUTS),
        )  # fmt: skip
