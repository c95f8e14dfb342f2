"""Sampling of rows with a floor, top_k or top_p: their cuts are found in a histogram and a short list, then a token.

Legend: r rows with cuts · V vocabulary · K room for listed tokens of a row · P parts of a row · T listed tokens at once
Owns: the further passes over those rows' logits, the cuts, the draw.  Does not know: parameters, other rows.

A sort of the vocabulary would move 152 k tokens to find a floor that a few hundred decide.  ``picks.py`` computes a
bound below which no token can be drawn.  What is left of a row is spread over programs, one for each part:

  1. ``weigh_candidates`` adds candidates to a histogram if the row has a far cut.
  2. ``narrow_row`` finds the bin in which it reaches top_p: likelier tokens are kept, less likely ones are not.
  3. ``list_candidates`` lists the tokens between, in any order, few unless many logits are almost equal, and sums the
     kept ones of each part.
  4. ``draw_candidate`` finds the exact cut in the list, the part of the drawn number, and the token in that part.

All sums are of integers, so tokens do not depend on the order in which programs run, nor on bins and parts.

The result may differ from torch's sampler if rounding exp's last digit moves a cut or the drawn number across the
border between two tokens.  Tokens of less than 2**-40 of the most likely one's weight are never drawn; torch draws them
once in 1e12.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.draw import BLOCK
from engine.sampling.triton.noise import uniform
from engine.sampling.triton.parts import KernelPart
from engine.sampling.triton.picks import Bounds
from engine.sampling.triton.scores import (
    BINS,
    bin_of,
    bin_reaching,
    has_far_cut,
    listed_sum,
    magnitude,
    magnitude_reaching,
    units,
)

TOKENS_OF_A_PART = 4096
LISTED_AT_ONCE = 2048


def pick_candidates(
    logits_NV: Tensor,
    at_n: Tensor,
    part: KernelPart,
    positions_N: Tensor,
    bounds: Bounds,
    first: int,
    last: int,
    token_ids_N: Tensor,
) -> None:
    """Write the tokens of cut rows ``first`` to ``last``, exclusive; the token of a failed row is not changed.

    The arguments are those of ``pick``, and its result.  Takes 8 V bytes of memory for each of the rows.
    """
    cut_rows = part.cut_rows
    assert cut_rows is not None, "only a part with cuts has bounds"
    vocab_size, num_rows, device = logits_NV.shape[1], last - first, logits_NV.device
    num_parts = triton.cdiv(vocab_size, TOKENS_OF_A_PART)
    of_rows = (logits_NV, logits_NV.stride(0), at_n, part.inverse_temperature_n, cut_rows.at_r)
    cuts = (cut_rows.top_k_r, cut_rows.top_p_r)
    if part.far_cuts:
        num_blocks = triton.cdiv(vocab_size, BLOCK)
        weigh_candidates[(num_parts, num_rows)](
            *of_rows, cut_rows.floor_r, *cuts, *bounds, first, vocab_size, num_blocks,
            BLOCK_V=TOKENS_OF_A_PART,
            num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
        narrow_row[(num_rows,)](*cuts, *bounds, first, num_blocks, num_warps=16)
    tokens_rK = torch.empty((num_rows, vocab_size), dtype=torch.int64, device=device)
    masses_rP = torch.empty((num_rows, num_parts), dtype=torch.int64, device=device)
    list_candidates[(num_parts, num_rows)](
        *of_rows, *bounds, tokens_rK, masses_rP, first, vocab_size,
        BLOCK_V=TOKENS_OF_A_PART,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    draw_candidate[(num_rows,)](
        *of_rows, *cuts, *bounds, tokens_rK, masses_rP,
        part.at_n, part.seeds_n, positions_N, token_ids_N, first, vocab_size, num_parts,
        BLOCK_V=TOKENS_OF_A_PART, BLOCK_P=triton.next_power_of_2(num_parts), TILE=LISTED_AT_ONCE,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=[
        "at", "inverse_temperature", "cut_at", "floors", "top_ks", "top_ps", "tops", "kept", "bounds", "counts",
        "totals", "below",
    ],
)  # fmt: skip
def weigh_candidates(
    logits, row_stride, at, inverse_temperature, cut_at, floors, top_ks, top_ps, tops, kept, bounds, counts, totals,
    below, histograms, first, vocab_size, num_blocks,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the tokens of one part per program to the histogram of its row, if it needs one, and to the row's total."""
    r = first + tl.program_id(1)
    bound = tl.load(bounds + r)
    top_k = tl.load(top_ks + r)
    if (bound >= 0) & has_far_cut(top_k, tl.load(top_ps + r), num_blocks):
        # As if they were no neighbours: one layout for loads and additions saves half of the instructions.
        v_V = tl.max_contiguous(tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), 1)
        magnitude_V = magnitudes_of(logits, row_stride, at, inverse_temperature, cut_at, tops, r, v_V, vocab_size)
        units_V = tl.where(magnitude_V <= tl.load(floors + r), units(magnitude_V), 0)
        # Relaxed: a fence for each addition would take longer than all else, and later launches see all of them.
        tl.atomic_add(totals + r, tl.sum(units_V, 0), sem="relaxed")
        amount_V = tl.where(top_k > 0, 1, units_V)
        bin_V = bin_of(magnitude_V, bound)
        tl.atomic_add(histograms + r * BINS + bin_V, amount_V, mask=magnitude_V <= bound, sem="relaxed")


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=["top_ks", "top_ps", "tops", "kept", "bounds", "counts", "totals", "below"],
)
def narrow_row(
    top_ks, top_ps, tops, kept, bounds, counts, totals, below, histograms, first, num_blocks
):  # fmt: skip
    """Narrow what is undecided of one row per program to the bin with the cut, if the row has a histogram."""
    r = first + tl.program_id(0)
    bound = tl.load(bounds + r)
    top_k = tl.load(top_ks + r)
    top_p = tl.load(top_ps + r)
    if (bound >= 0) & has_far_cut(top_k, top_p, num_blocks):
        target = tl.where(top_k > 0, top_k, units_to_reach(tl.load(totals + r), top_p))
        before, last, sum_before = bin_reaching(histograms + r * BINS, target, bound)
        tl.store(bounds + r, last)
        if top_k == 0:  # else top_p may cut further
            tl.store(kept + r, before)
            tl.store(below + r, sum_before)


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=[
        "at", "inverse_temperature", "cut_at", "tops", "kept", "bounds", "counts", "totals", "below",
    ],
)  # fmt: skip
def list_candidates(
    logits, row_stride, at, inverse_temperature, cut_at, tops, kept, bounds, counts, totals, below, histograms,
    tokens, masses, first, vocab_size,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """List the undecided tokens of one part of a row per program, and sum the units of the kept ones."""
    r = first + tl.program_id(1)
    bound = tl.load(bounds + r)
    if bound >= 0:
        surely = tl.load(kept + r)
        v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        magnitude_V = magnitudes_of(logits, row_stride, at, inverse_temperature, cut_at, tops, r, v_V, vocab_size)
        mass = tl.sum(tl.where(magnitude_V <= surely, units(magnitude_V), 0), 0)
        tl.store(masses + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), mass)
        listed_V = (magnitude_V > surely) & (magnitude_V <= bound)
        num_listed = tl.sum(listed_V.to(tl.int32), 0)
        if num_listed > 0:
            place_V = tl.atomic_add(counts + r, num_listed, sem="relaxed") + tl.cumsum(listed_V.to(tl.int32), 0) - 1
            token_V = (magnitude_V.to(tl.int64) << 32) | v_V
            tl.store(tokens + tl.program_id(1).to(tl.int64) * vocab_size + place_V, token_V, mask=listed_V)


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=[
        "at", "inverse_temperature", "cut_at", "top_ks", "top_ps", "tops", "kept", "bounds", "counts", "totals",
        "below", "out_at", "seeds", "positions", "out",
    ],
)  # fmt: skip
def draw_candidate(
    logits, row_stride, at, inverse_temperature, cut_at, top_ks, top_ps, tops, kept, bounds, counts, totals, below,
    histograms, tokens, masses, out_at, seeds, positions, out, first, vocab_size, num_parts,
    BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draw one row's token per program: apply top_k, then top_p to the rest, then draw from the rest."""
    r = first + tl.program_id(0)
    limit = tl.load(bounds + r)
    if limit >= 0:
        tokens += tl.program_id(0).to(tl.int64) * vocab_size
        num = tl.load(counts + r)
        top_k = tl.load(top_ks + r)
        top_p = tl.load(top_ps + r)
        total = tl.load(totals + r)
        if top_k > 0:
            limit = magnitude_reaching(tokens, num, limit, top_k.to(tl.int64), False, TILE)
            total = listed_sum(tokens, num, limit, vocab_size, True, TILE)
        if top_p < 1.0:
            limit = magnitude_reaching(
                tokens, num, limit, units_to_reach(total, top_p) - tl.load(below + r), True, TILE
            )

        n = tl.load(cut_at + r)
        out_row = tl.load(out_at + n)
        p_P = tl.arange(0, BLOCK_P)
        mass_P = tl.load(masses + tl.program_id(0) * num_parts + p_P, mask=p_P < num_parts, other=0)
        mass = tl.sum(mass_P, 0) + listed_sum(tokens, num, limit, vocab_size, True, TILE)
        number = uniform(tl.load(seeds + n), tl.load(positions + out_row))
        drawn = tl.minimum((number * mass.to(tl.float64)).to(tl.int64), mass - 1)
        # The first part up to which there is more than the drawn number, and what is in front of it.
        part = num * 0
        high = part + num_parts - 1
        before = mass * 0
        while part < high:
            middle = (part + high) // 2
            up_to = tl.sum(tl.where(p_P <= middle, mass_P, 0), 0)
            up_to += listed_sum(tokens, num, limit, (middle + 1) * BLOCK_V, True, TILE)
            if up_to > drawn:
                high = middle
            else:
                part = middle + 1
                before = up_to
        v_V = part * BLOCK_V + tl.arange(0, BLOCK_V)
        magnitude_V = magnitudes_of(logits, row_stride, at, inverse_temperature, cut_at, tops, r, v_V, vocab_size)
        up_to_V = before + tl.cumsum(tl.where(magnitude_V <= limit, units(magnitude_V), 0), 0)
        tl.store(out + out_row, tl.min(tl.where(up_to_V > drawn, v_V, vocab_size - 1), 0).to(tl.int64))


@triton.jit
def magnitudes_of(logits, row_stride, at, inverse_temperature, cut_at, tops, r, v_V, vocab_size):
    """Return the magnitudes of tokens of a row; infinity's for those outside of the vocabulary."""
    n = tl.load(cut_at + r)
    of_row = logits + tl.load(at + n) * row_stride
    logit_V = tl.load(of_row + v_V, mask=v_V < vocab_size, other=-float("inf")).to(tl.float32)
    return magnitude((logit_V - tl.load(tops + r)) * tl.load(inverse_temperature + n))


@triton.jit
def units_to_reach(total, top_p):
    """Return top_p of the units, at least one."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
