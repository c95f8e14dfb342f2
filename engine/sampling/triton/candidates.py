"""Sampling of rows with a floor, top_k or top_p: their few likely tokens are gathered, cut and drawn from.

Legend: r rows with cuts · V vocabulary · K room for candidates of a row · T candidates at once
Owns: the second pass over those rows' logits, the cuts, the draw.  Does not know: parameters, other rows.

A sort of the vocabulary would move 152 k tokens to find a floor that a few hundred decide.  ``picks.py`` computes a
bound below which no token can be drawn.  So candidates above it are gathered first, in any order, and every search
(the magnitude up to which there are k candidates, or top_p of the weight; the id at the drawn number) goes digit by
digit, with a histogram for each: at most 10 passes over the candidates, however they are distributed, 6 for top_p
alone.  With a flat distribution the candidates are the whole vocabulary; with that of a language model they are few.

The result may differ from torch's sampler if rounding exp's last digit moves a cut or the drawn number across the
border between two tokens.  Tokens of less than 2**-40 of the most likely one's weight are never drawn; torch draws them
once in 1e12.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.triton.noise import uniform
from engine.sampling.triton.parts import KernelPart
from engine.sampling.triton.picks import Bounds
from engine.sampling.triton.scores import (
    BINS,
    COUNTED,
    id_reaching,
    magnitude,
    magnitude_reaching,
    units,
    units_up_to,
)

TOKENS_OF_A_PROGRAM = 4096
CANDIDATES_AT_ONCE = 2048


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
    vocab_size = logits_NV.shape[1]
    magnitudes_rK, ids_rK = torch.empty(
        (2, last - first, vocab_size), dtype=torch.int32, device=logits_NV.device
    ).unbind()
    histograms_rB = torch.empty((last - first, BINS.value), dtype=torch.int64, device=logits_NV.device)
    gather_candidates[(triton.cdiv(vocab_size, TOKENS_OF_A_PROGRAM), last - first)](
        logits_NV, logits_NV.stride(0), at_n, part.inverse_temperature_n, cut_rows.at_r, *bounds,
        magnitudes_rK, ids_rK, first, vocab_size,
        BLOCK_V=TOKENS_OF_A_PROGRAM,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    draw_candidate[(last - first,)](
        part.at_n, part.seeds_n, positions_N, cut_rows.at_r, cut_rows.floor_r, cut_rows.top_k_r, cut_rows.top_p_r,
        bounds.bound_r, bounds.counts_r, bounds.totals_r, magnitudes_rK, ids_rK, histograms_rB, token_ids_N, first,
        vocab_size,
        TILE=CANDIDATES_AT_ONCE,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=[
        "at", "inverse_temperature", "cut_at", "tops", "bounds", "counts", "totals", "magnitudes", "ids",
    ],
)  # fmt: skip
def gather_candidates(
    logits, row_stride, at, inverse_temperature, cut_at, tops, bounds, counts, totals, magnitudes, ids, first,
    vocab_size,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Gather the candidates among some neighbouring tokens of one row per program."""
    r = first + tl.program_id(1)
    n = tl.load(cut_at + r)
    bound = tl.load(bounds + r)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    live_V = v_V < vocab_size
    of_row = logits + tl.load(at + n) * row_stride
    logit_V = tl.load(of_row + v_V, mask=v_V < tl.where(bound >= 0, vocab_size, 0), other=-float("inf")).to(tl.float32)
    magnitude_V = magnitude((logit_V - tl.load(tops + r)) * tl.load(inverse_temperature + n))
    # COUNTED plus all that other programs have added to it is below 0.
    if tl.load(totals + r) < 0:
        tl.atomic_add(totals + r, tl.sum(tl.where(live_V, units(magnitude_V), 0), 0))
    kept_V = live_V & (magnitude_V <= bound)
    num_kept = tl.sum(kept_V.to(tl.int32), 0)
    if num_kept > 0:
        place_V = tl.atomic_add(counts + r, num_kept) + tl.cumsum(kept_V.to(tl.int32), 0) - 1
        place_V = tl.program_id(1).to(tl.int64) * vocab_size + place_V
        tl.store(magnitudes + place_V, magnitude_V, mask=kept_V)
        tl.store(ids + place_V, v_V, mask=kept_V)


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=[
        "out_at", "seeds", "positions", "cut_at", "floors", "top_ks", "top_ps", "bounds", "counts", "totals",
        "magnitudes", "ids", "histograms", "out",
    ],
)  # fmt: skip
def draw_candidate(
    out_at, seeds, positions, cut_at, floors, top_ks, top_ps, bounds, counts, totals, magnitudes, ids, histograms, out,
    first, vocab_size,
    TILE: tl.constexpr,
):  # fmt: skip
    """Draw one row's token per program: apply floor and top_k, then top_p to the rest, then draw from the rest."""
    r = first + tl.program_id(0)
    num = tl.load(counts + r)
    if num > 0:
        n = tl.load(cut_at + r)
        out_row = tl.load(out_at + n)
        of_row = tl.program_id(0).to(tl.int64) * vocab_size
        magnitudes += of_row
        ids += of_row
        histogram = histograms + tl.program_id(0).to(tl.int64) * BINS
        floor = tl.minimum(tl.load(floors + r), tl.load(bounds + r))
        top_k = tl.load(top_ks + r)
        if top_k > 0:
            floor = magnitude_reaching(magnitudes, num, floor, top_k.to(tl.int64), histogram, False, TILE)
        top_p = tl.load(top_ps + r)
        if top_p < 1.0:
            total = tl.load(totals + r)
            if total < 0:
                total -= COUNTED
            else:
                total = units_up_to(magnitudes, num, floor, TILE)
            target = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
            floor = magnitude_reaching(magnitudes, num, floor, target, histogram, True, TILE)
        number = uniform(tl.load(seeds + n), tl.load(positions + out_row))
        mass = units_up_to(magnitudes, num, floor, TILE)
        drawn = (number * mass.to(tl.float64)).to(tl.int64)
        token = tl.minimum(id_reaching(ids, magnitudes, num, floor, drawn + 1, histogram, TILE), vocab_size - 1)
        tl.store(out + out_row, token.to(tl.int64))
