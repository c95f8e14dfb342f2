"""A mixture of experts in four to seven launches, whose sizes depend only on the number of tokens.

Legend: T tokens · D model dim · E experts · K experts of a token · P pairs of token and expert, T K · I intermediate
        features · O outputs of gate and up, 2 I · M pairs of a tile · N outputs of a tile · C inputs of a tile
        R rows of a tile of weights in 4 bits · G a group of inputs, or the bytes of two
Owns: the order of pairs by expert, the two products over experts that have pairs, the sum of a token's results.
Does not know: how experts are chosen, ranks.

Pairs are sorted by expert, then by token, and cut into tiles of one expert each.  Only the device knows the number of
tiles, so programs are launched for the most there can be, and those without a tile end.  A pair's result does not
depend on the rest of its tile, and a token's results are added up in one order: a token gets the same bits in any batch

Weights in 4 bits become bfloat16 in registers, exactly: a tile of them is the first operand of the product, which
tensor cores of a Hopper GPU read from registers.

With weights in float8 the inputs of both products are rounded to float8 with a scale per 128 of them, as ``float8.py``
rounds rows for other layers: those of few pairs in registers, those of many by a launch in front of each product, as
all blocks of columns read them.  The sum over such a block is scaled and added up in float32.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import float8
from engine.kernels.activation import KINDS, activated
from engine.kernels.products import multiply
from engine.kernels.rounding import MAX_WIDTH, round_rows
from engine.layers.float8_experts import BLOCK, EightBits
from engine.layers.four_bits import FourBits

CLAMPED: Final = 3  # in addition to the kinds of ``activation.py``: alternating gates and ups (``clamped_swish``)
PAIRS_AT_ONCE: Final = 1024
FEW_PAIRS: Final = 2048  # of a decode step: each expert's program looks at all of them; more are cut into blocks
BLOCKS_AT_ONCE: Final = 16  # whose counts a program reads together
TILES_AT_ONCE: Final = 8  # whose programs are neighbours: they share weights, and their columns share inputs
TILE_BYTES = 128  # of a row of a tile's inputs, a cache line


class Tiles(NamedTuple):
    """Sizes of the tiles of both products.  most_pairs: per expert, on average, up to which they are used.

    pairs: rows of a tile.  gate_columns: of gate and of up each.  down_columns.  warps.  unrolled: pairs of groups of
    inputs in one turn of the loop over weights in 4 bits."""

    most_pairs: float
    pairs: int
    gate_columns: int
    down_columns: int
    warps: int
    unrolled: int = 1


# With more pairs, larger tiles read weights and inputs less often; a tile that is not full costs as much as a full one.
TILES: Final = (Tiles(32, 16, 64, 64, 4), Tiles(128, 64, 32, 64, 4), Tiles(math.inf, 128, 64, 128, 8))
FLOAT8_TILES: Final = (Tiles(32, 16, 64, 64, 4), Tiles(128, 64, 64, 128, 4), Tiles(math.inf, 128, 64, 128, 8))
LARGEST = tl.constexpr(float8.LARGEST)
SMALLEST = tl.constexpr(float8.SMALLEST)
FOUR_BIT_TILES: Final = (Tiles(32, 16, 32, 64, 4, 2), Tiles(128, 64, 32, 64, 4), Tiles(math.inf, 128, 32, 64, 4))


def mix_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_EOD: Tensor | FourBits | EightBits,
    down_EDI: Tensor | FourBits | EightBits,
    gate_up_bias_EO: Tensor | None,
    down_bias_ED: Tensor | None,
    kind: str,
    limit: float = 0.0,
    slope: float = 1.0,
    first_expert: int | None = None,
    summed: bool = True,
) -> Tensor:
    """Return the sum of weight * down(activation(gate(x)) * up(x)) over a token's experts, [T, D] in x's dtype.

    summed: False for the summands, [T, K, D].
    first_expert: number of the first expert in gate_up and down, if some are not there; these add nothing.
    x, gate_up, down: of one dtype, contiguous; or the latter two are ``FourBits``, x is bfloat16, and kind is
    "clamped_swish"; or they are ``EightBits``, and kind is another.  weights: any dtype.  experts: int64, distinct
    for a token.
    kind: a name in ``KINDS``, with all of gate first; or "clamped_swish" with limit and slope, alternating.
    Sums are float32; activations and each expert's weighted result are rounded to x's dtype.
    """
    (num_tokens, width), num_chosen, packed = x_TD.shape, experts_TK.shape[1], isinstance(gate_up_EOD, FourBits)
    group = BLOCK if isinstance(gate_up_EOD, EightBits) else 0
    gate_up, gate_up_scales = (gate_up_EOD, None) if isinstance(gate_up_EOD, Tensor) else gate_up_EOD
    down, down_scales = (down_EDI, None) if isinstance(down_EDI, Tensor) else down_EDI
    num_experts, inner = len(gate_up), gate_up.shape[2 if packed else 1] // 2
    assert kind == "clamped_swish" or not packed, f"weights in 4 bits have gates and ups in turns, not {kind}"
    assert not group or (kind != "clamped_swish" and width % group == inner % group == 0), f"{kind}, {width}, {inner}"
    assert all(one.is_contiguous() for one in (x_TD, weights_TK, experts_TK, gate_up, down)), "not contiguous"
    if not (num_pairs := num_tokens * num_chosen):
        return torch.empty_like(x_TD)
    order_P, counts_E = sorted_pairs(experts_TK, num_experts, first_expert or 0)
    tiles = tiles_for(num_pairs, num_experts, FOUR_BIT_TILES if packed else FLOAT8_TILES if group else TILES)
    num_tiles = num_pairs // tiles.pairs + min(num_experts, num_pairs)
    rounded = group if tiles.pairs > FLOAT8_TILES[0].pairs and max(width, inner) <= MAX_WIDTH else 0
    shared = {
        "NUM_CHOSEN": num_chosen, "NUM_EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": tiles.pairs, "BLOCK_C": group or TILE_BYTES // x_TD.element_size(), "UNROLLED": tiles.unrolled,
        "AT_ONCE": TILES_AT_ONCE, "GROUP": group, "ROUNDED": bool(rounded), "num_warps": tiles.warps,
        "INTERPRETED": x_TD.device.type == "cpu", "num_stages": 3, "enable_fp_fusion": True,
    }  # fmt: skip
    gated_PI = x_TD.new_empty((num_pairs, inner))
    gate_pairs[(num_tiles * triton.cdiv(inner, tiles.gate_columns),)](
        *_read_once(x_TD, rounded), order_P, counts_E, gate_up, gate_up_scales, gate_up_bias_EO, gated_PI, num_tiles,
        limit, slope, INNER=width, WIDTH=inner, KIND=CLAMPED if kind == "clamped_swish" else KINDS[kind],
        BIASED=gate_up_bias_EO is not None, PACKED=packed, BLOCK_N=tiles.gate_columns, **shared,
    )  # fmt: skip
    new = x_TD.new_empty if first_expert is None else x_TD.new_zeros  # no program writes those of other ranks
    results_PD = new((num_pairs, width))
    down_pairs[(num_tiles * triton.cdiv(width, tiles.down_columns),)](
        *_read_once(gated_PI, rounded), order_P, counts_E, down, down_scales, down_bias_ED, weights_TK, results_PD,
        num_tiles, INNER=inner, WIDTH=width, BIASED=down_bias_ED is not None, PACKED=packed,
        BLOCK_N=tiles.down_columns, **shared,
    )  # fmt: skip
    results_TKD = results_PD.view(num_tokens, num_chosen, width)
    return results_TKD.sum(1) if summed else results_TKD


def _read_once(x_TI: Tensor, group: int) -> tuple[Tensor, Tensor | None, int]:
    """Return the inputs of a product, their scales and the stride of these: rounded to float8, if there is a group.

    Every block of columns reads all inputs of a tile: of many pairs they are rounded once, by a launch."""
    if not group:
        return x_TI, None, 0
    rounded_TI, scales_TG = round_rows(x_TI, group)
    return rounded_TI, scales_TG, scales_TG.stride(1)


def tiles_for(num_pairs: int, num_experts: int, sizes: Sequence[Tiles]) -> Tiles:
    """Return the sizes of tiles for so many pairs of each expert as a mean."""
    return next(one for one in sizes if num_pairs <= one.most_pairs * num_experts)


def sorted_pairs(experts_TK: Tensor, num_experts: int, first_expert: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of some experts, by expert and then by token, and each expert's number of them, int32."""
    num_pairs, device = experts_TK.numel(), experts_TK.device
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    if num_pairs <= FEW_PAIRS:
        place_pairs[(num_experts,)](
            experts_TK, order_P, counts_E, num_pairs, first_expert, BLOCK_P=PAIRS_AT_ONCE, num_warps=4
        )
        return order_P, counts_E
    num_blocks, padded = triton.cdiv(num_pairs, PAIRS_AT_ONCE), triton.next_power_of_2(num_experts + 1)
    counts_BE = torch.empty((num_blocks, padded), dtype=torch.int32, device=device)
    sizes = {"NUM_EXPERTS": num_experts, "BLOCK_P": PAIRS_AT_ONCE, "BLOCK_E": padded, "num_warps": 4}
    count_block[(num_blocks,)](experts_TK, counts_BE, num_pairs, first_expert, **sizes)
    place_block[(num_blocks,)](
        experts_TK, order_P, counts_E, counts_BE, num_pairs, first_expert, num_blocks, BLOCK_B=BLOCKS_AT_ONCE, **sizes
    )
    return order_P, counts_E


@triton.jit
def experts_of_block(
    experts, num_pairs, first_expert, NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Return the experts of this program's pairs, counted from first_expert; NUM_EXPERTS for those not here."""
    p_P = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    expert_P = tl.load(experts + p_P, mask=p_P < num_pairs, other=-1) - first_expert
    here_P = (p_P < num_pairs) & (expert_P >= 0) & (expert_P < NUM_EXPERTS)
    return tl.where(here_P, expert_P, NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def count_block(
    experts, counts, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in one block of pairs per program."""
    expert_P = experts_of_block(experts, num_pairs, first_expert, NUM_EXPERTS, BLOCK_P, BLOCK_E)
    tl.store(counts + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(expert_P, BLOCK_E))


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_blocks"])
def place_block(
    experts, order, totals, counts, num_pairs, first_expert, num_blocks,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """List one block of pairs per program, each expert's behind those of the blocks before; count all of them."""
    block = tl.program_id(0)
    e_E = tl.arange(0, BLOCK_E)
    total_E = tl.zeros([BLOCK_E], tl.int32)
    before_E = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b_B = first + tl.arange(0, BLOCK_B)
        count_BE = tl.load(counts + b_B[:, None] * BLOCK_E + e_E[None, :], mask=(b_B < num_blocks)[:, None], other=0)
        total_E += tl.sum(count_BE, 0)
        before_E += tl.sum(tl.where((b_B < block)[:, None], count_BE, 0), 0)
    if block == 0:
        tl.store(totals + e_E, total_E, mask=e_E < NUM_EXPERTS)
    mine_E = tl.load(counts + block * BLOCK_E + e_E)
    # Sorted by expert, then by number: from a pair's place among them follows its place among its expert's.
    p_P = tl.arange(0, BLOCK_P)
    expert_P = experts_of_block(experts, num_pairs, first_expert, NUM_EXPERTS, BLOCK_P, BLOCK_E)
    sorted_P = tl.sort(expert_P * BLOCK_P + p_P)
    expert_P = sorted_P // BLOCK_P
    begin_E = tl.cumsum(total_E, 0) - total_E + before_E - (tl.cumsum(mine_E, 0) - mine_E)
    place_P = tl.gather(begin_E, expert_P, 0) + p_P
    tl.store(order + place_P, block * BLOCK_P + sorted_P % BLOCK_P, mask=expert_P < NUM_EXPERTS)


# The number of tokens must not make another variant: compiling one takes a second, during which clients wait.
@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def place_pairs(experts, order, counts, num_pairs, first_expert, BLOCK_P: tl.constexpr):
    """List the pairs of one expert per program, after those of earlier experts, and count them."""
    expert = first_expert + tl.program_id(0)
    p_P = tl.arange(0, BLOCK_P)
    before_P = tl.zeros([BLOCK_P], tl.int32)
    for first in range(0, num_pairs, BLOCK_P):
        chosen_P = tl.load(experts + first + p_P, mask=first + p_P < num_pairs, other=1 << 30)
        before_P += ((chosen_P >= first_expert) & (chosen_P < expert)).to(tl.int32)
    begin = tl.sum(before_P, 0)
    place = begin
    for first in range(0, num_pairs, BLOCK_P):
        chosen_P = tl.load(experts + first + p_P, mask=first + p_P < num_pairs, other=1 << 30)
        mine_P = (chosen_P == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine_P, 0) - 1, first + p_P, mask=mine_P > 0)
        place += tl.sum(mine_P, 0)
    tl.store(counts + tl.program_id(0), place - begin)


@triton.jit
def find_tile(counts, tile, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (expert, first pair, end of its pairs) of a tile; after the last tile there are no pairs."""
    e_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts + e_E, mask=e_E < NUM_EXPERTS, other=0)
    tiles_E = tl.cdiv(count_E, BLOCK_M)
    passed_E = tl.cumsum(tiles_E, 0) <= tile
    expert = tl.sum(passed_E.to(tl.int32), 0)
    begin = tl.sum(tl.where(passed_E, count_E, 0), 0)
    first = begin + (tile - tl.sum(tl.where(passed_E, tiles_E, 0), 0)) * BLOCK_M
    return expert, first, begin + tl.sum(tl.where(e_E == expert, count_E, 0), 0)


@triton.jit
def multiply_codes(
    codes, scales, rows_R, live_R, x, at_M, live_M, sums_RM,
    OUTPUTS: tl.constexpr, INNER: tl.constexpr, UNROLLED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return sums + some rows of one expert's weights in 4 bits, times the rows of x that begin at x + at."""
    g_G = tl.arange(0, 32)
    for first in range(0, (INNER + 63) // 64, UNROLLED):
        for more in tl.static_range(UNROLLED):
            pair = first + more
            live_RG = (live_R & (pair < (INNER + 63) // 64))[:, None]
            code_RG = tl.load(codes + (pair * OUTPUTS + rows_R)[:, None] * 32 + g_G[None, :], mask=live_RG, other=0)
            code_RG = code_RG.to(tl.int16)
            # The lower bits of a code, as the upper bits of bfloat16's exponent and mantissa, with its sign.
            sums_RM = multiply_group(
                ((code_RG & 7) << 6) | ((code_RG & 8) << 12), scales + 2 * pair * OUTPUTS, rows_R, live_R,
                x, at_M, live_M, 64 * pair + g_G, sums_RM, INNER, INTERPRETED,
            )  # fmt: skip
            sums_RM = multiply_group(
                ((code_RG & 112) << 2) | ((code_RG & 128) << 8), scales + (2 * pair + 1) * OUTPUTS, rows_R, live_R,
                x, at_M, live_M, 64 * pair + 32 + g_G, sums_RM, INNER, INTERPRETED,
            )  # fmt: skip
    return sums_RM


@triton.jit
def multiply_group(
    bits_RG, scales, rows_R, live_R, x, at_M, live_M, c_G, sums_RM, INNER: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Return sums + the product of one group of inputs.  bits: of bfloat16 numbers, 2^126 times too small."""
    live_R = live_R & (tl.min(c_G, 0) < INNER)
    scale_R = tl.load(scales + rows_R, mask=live_R, other=1).to(tl.int16)
    factor_R = ((scale_R + 126) << 7).to(tl.uint16)
    if INTERPRETED:  # which takes the smallest bfloat16 numbers for zeros
        weight_RG = (bits_RG.to(tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        factor_R = (factor_R.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        weight_RG = bits_RG.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        factor_R = factor_R.to(tl.bfloat16, bitcast=True)
    x_GM = tl.load(x + at_M[None, :] + c_G[:, None], mask=live_M[None, :] & (c_G < INNER)[:, None], other=0.0)
    return multiply(weight_RG * factor_R[:, None], x_GM, sums_RM, INTERPRETED)


@triton.jit
def rounded_rows(x_MC):
    """Return rows in float8, and the float32 scale of each."""
    x_MC = x_MC.to(tl.float32)
    # Exact divisions, as of ``rounding.py``: bfloat16 numbers lie half-way between two of float8 often.
    largest_M = tl.maximum(tl.max(tl.abs(x_MC), 1), SMALLEST)
    scale_M = tl.div_rn(largest_M, tl.zeros_like(largest_M) + LARGEST)
    shrunk_MC = tl.div_rn(x_MC, tl.zeros_like(x_MC) + scale_M[:, None])
    # A GPU's maximum leaves NaN out, and so would its clamp.
    shrunk_MC = tl.clamp(shrunk_MC, -LARGEST, LARGEST, tl.PropagateNan.ALL)
    return shrunk_MC.to(tl.float8e4nv), scale_M


@triton.jit
def multiply_block(
    rounded_MC, scale_M, weight, scales, block, rows_N, at, c_C, sums_MN, INNER: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Return sums + the product with rows of a weight in float8, in one block of outputs, over one block of inputs.

    weight, scales: of one expert.  block: of outputs.  at: the block of inputs."""
    weight_NC = tl.load(weight + rows_N[:, None] * INNER + c_C[None, :])
    zeros_MN = tl.zeros([scale_M.shape[0], rows_N.shape[0]], tl.float32)
    product_MN = multiply(rounded_MC, tl.trans(weight_NC), zeros_MN, INTERPRETED)
    scale = tl.load(scales + block * (INNER // 128) + at)
    return sums_MN + product_MN * (scale_M * scale)[:, None]


@triton.jit
def near_tile(num_tiles, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return (tile, block of columns) of this program.

    A GPU begins programs in the order of their numbers.  All columns of AT_ONCE tiles come before the next tiles, so
    that the tiles' inputs and, as tiles of an expert follow each other, its weights are read from memory about once."""
    columns = (WIDTH + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (AT_ONCE * columns)
    place = tl.program_id(0) % (AT_ONCE * columns)
    size = tl.minimum(num_tiles - group * AT_ONCE, AT_ONCE)
    return group * AT_ONCE + place % size, place // size


@triton.jit(do_not_specialize=["num_tiles", "x_stride"])
def gate_pairs(
    x, x_scales, x_stride, order, counts, gate_up, scales, bias, out, num_tiles, limit, slope,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, UNROLLED: tl.constexpr, AT_ONCE: tl.constexpr, GROUP: tl.constexpr,
    ROUNDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute some columns of activation(gate(x)) * up(x) for a tile's pairs, in order."""
    tile, columns = near_tile(num_tiles, WIDTH, BLOCK_N, AT_ONCE)
    expert, first, stop = find_tile(counts, tile, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if first >= stop:
        return
    place_M = first + tl.arange(0, BLOCK_M)
    live_M = place_M < stop
    token_M = (tl.load(order + place_M, mask=live_M, other=0) // NUM_CHOSEN).to(tl.int64)
    n_N = columns * BLOCK_N + tl.arange(0, BLOCK_N)
    live_N = n_N < WIDTH
    if KIND == 3:
        gate_N = 2 * n_N
        up_N = 2 * n_N + 1
    else:
        gate_N = n_N
        up_N = WIDTH + n_N
    row = expert.to(tl.int64) * (2 * WIDTH)
    if PACKED:  # gates and ups in turns
        r_R = columns * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        both_RM = multiply_codes(
            gate_up + row * (32 * ((INNER + 63) // 64)), scales + row * (2 * ((INNER + 63) // 64)),
            r_R, r_R < 2 * WIDTH, x, token_M * INNER, live_M, tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32),
            2 * WIDTH, INNER, UNROLLED, INTERPRETED,
        )  # fmt: skip
        gate_MN, up_MN = tl.split(tl.trans(both_RM).reshape(BLOCK_M, BLOCK_N, 2))
    elif GROUP:
        gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gates = gate_up + row * INNER
        scales += expert * (2 * WIDTH // GROUP) * (INNER // GROUP)
        block = columns * BLOCK_N // GROUP
        for at in range(0, INNER // GROUP):
            c_C = at * GROUP + tl.arange(0, GROUP)
            x_MC = tl.load(x + token_M[:, None] * INNER + c_C[None, :], mask=live_M[:, None], other=0.0)
            if ROUNDED:
                rounded_MC, scale_M = x_MC, tl.load(x_scales + token_M + at * x_stride, mask=live_M, other=0.0)
            else:
                rounded_MC, scale_M = rounded_rows(x_MC)
            gate_MN = multiply_block(
                rounded_MC, scale_M, gates, scales, block, gate_N, at, c_C, gate_MN, INNER, INTERPRETED
            )
            up_MN = multiply_block(
                rounded_MC, scale_M, gates, scales, WIDTH // GROUP + block, up_N, at, c_C, up_MN, INNER, INTERPRETED
            )
    else:
        gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_C):
            c_C = start + tl.arange(0, BLOCK_C)
            live_C = (c_C < INNER)[None, :]
            x_MC = tl.load(x + token_M[:, None] * INNER + c_C[None, :], mask=live_M[:, None] & live_C, other=0.0)
            live_NC = live_N[:, None] & live_C
            gate_NC = tl.load(gate_up + (row + gate_N)[:, None] * INNER + c_C[None, :], mask=live_NC, other=0.0)
            gate_MN = multiply(x_MC, tl.trans(gate_NC), gate_MN, INTERPRETED)
            up_NC = tl.load(gate_up + (row + up_N)[:, None] * INNER + c_C[None, :], mask=live_NC, other=0.0)
            up_MN = multiply(x_MC, tl.trans(up_NC), up_MN, INTERPRETED)
    if BIASED:
        gate_MN += tl.load(bias + row + gate_N, mask=live_N, other=0.0).to(tl.float32)[None, :]
        up_MN += tl.load(bias + row + up_N, mask=live_N, other=0.0).to(tl.float32)[None, :]
    if KIND == 3:
        gate_MN = tl.minimum(gate_MN, limit)
        up_MN = tl.minimum(tl.maximum(up_MN, -limit), limit) + 1.0
        gate_MN = gate_MN * tl.sigmoid(gate_MN * slope)
    else:
        gate_MN = activated(gate_MN, KIND)
    out_MN = out + place_M.to(tl.int64)[:, None] * WIDTH + n_N[None, :]
    tl.store(out_MN, (gate_MN * up_MN).to(out.dtype.element_ty), mask=live_M[:, None] & live_N[None, :])


@triton.jit(do_not_specialize=["num_tiles", "gated_stride"])
def down_pairs(
    gated, gated_scales, gated_stride, order, counts, down, scales, bias, weights, out, num_tiles,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, UNROLLED: tl.constexpr, AT_ONCE: tl.constexpr, GROUP: tl.constexpr,
    ROUNDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute some columns of weight * down(...) for a tile's pairs, to the pairs' places."""
    tile, columns = near_tile(num_tiles, WIDTH, BLOCK_N, AT_ONCE)
    expert, first, stop = find_tile(counts, tile, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if first >= stop:
        return
    place_M = first + tl.arange(0, BLOCK_M)
    live_M = place_M < stop
    pair_M = tl.load(order + place_M, mask=live_M, other=0).to(tl.int64)
    n_N = columns * BLOCK_N + tl.arange(0, BLOCK_N)
    live_N = n_N < WIDTH
    row = expert.to(tl.int64) * WIDTH
    if PACKED:
        out_NM = multiply_codes(
            down + row * (32 * ((INNER + 63) // 64)), scales + row * (2 * ((INNER + 63) // 64)),
            n_N, live_N, gated, place_M.to(tl.int64) * INNER, live_M, tl.zeros([BLOCK_N, BLOCK_M], tl.float32),
            WIDTH, INNER, UNROLLED, INTERPRETED,
        )  # fmt: skip
        out_MN = tl.trans(out_NM)
    elif GROUP:
        out_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scales += expert * (WIDTH // GROUP) * (INNER // GROUP)
        block = columns * BLOCK_N // GROUP
        for at in range(0, INNER // GROUP):
            c_C = at * GROUP + tl.arange(0, GROUP)
            gated_MC = tl.load(
                gated + place_M.to(tl.int64)[:, None] * INNER + c_C[None, :], mask=live_M[:, None], other=0.0
            )
            if ROUNDED:
                rounded_MC, scale_M = (
                    gated_MC,
                    tl.load(gated_scales + place_M + at * gated_stride, mask=live_M, other=0.0),
                )
            else:
                rounded_MC, scale_M = rounded_rows(gated_MC)
            out_MN = multiply_block(
                rounded_MC, scale_M, down + row * INNER, scales, block, n_N, at, c_C, out_MN, INNER, INTERPRETED
            )
    else:
        out_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_C):
            c_C = start + tl.arange(0, BLOCK_C)
            live_C = (c_C < INNER)[None, :]
            gated_MC = tl.load(
                gated + place_M.to(tl.int64)[:, None] * INNER + c_C[None, :], mask=live_M[:, None] & live_C, other=0.0
            )
            live_NC = live_N[:, None] & live_C
            down_NC = tl.load(down + (row + n_N)[:, None] * INNER + c_C[None, :], mask=live_NC, other=0.0)
            out_MN = multiply(gated_MC, tl.trans(down_NC), out_MN, INTERPRETED)
    if BIASED:
        out_MN += tl.load(bias + row + n_N, mask=live_N, other=0.0).to(tl.float32)[None, :]
    out_MN *= tl.load(weights + pair_M, mask=live_M, other=0.0).to(tl.float32)[:, None]
    at_MN = out + pair_M[:, None] * WIDTH + n_N[None, :]
    tl.store(at_MN, out_MN.to(out.dtype.element_ty), mask=live_M[:, None] & live_N[None, :])
