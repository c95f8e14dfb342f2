"""One token per row from its blocks' numbers: the most likely one, or one drawn with a temperature.

Legend: n rows of a part · V vocabulary · C blocks of a row, padded · B block size · r rows with cuts
Owns: the tokens of rows without cuts; for rows with cuts, a bound below which no token can be drawn.
Does not know: candidates (``candidates.py``).

Greedy rows are the same as torch's.  A draw uses the same uniform number over the same weights in the same order, but
sums of weights are rounded at other places, so a number within about 1e-7 of the border between two tokens may fall on
its other side.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.draw import BLOCK
from engine.sampling.triton.noise import uniform
from engine.sampling.triton.scores import BINS, LEAST, magnitude

if TYPE_CHECKING:
    from engine.sampling.triton.parts import KernelPart


@dataclass(frozen=True, slots=True)
class CutRows:
    """Rows with cuts; a captured batch has entries for more of them.

    index_n: int32, the index in the following arrays of each row of the part, -1 for none.  at_r: int32, the reverse.
    floor_r: int32, magnitude of the lowest score that may be drawn.
    top_k_r: int32, 0 is off.  top_p_r: float64, 1 is off.
    """

    index_n: Tensor
    at_r: Tensor
    floor_r: Tensor
    top_k_r: Tensor
    top_p_r: Tensor


class Bounds(NamedTuple):
    """Intermediate results of rows with cuts, in the order of the kernels' arguments.

    top_r: float32, the largest logit.
    kept_r: int32, a magnitude up to which tokens are kept, whatever the others are; -1 for none.
    bound_r: int32, largest magnitude that can be drawn; -1 if the row failed or there is none.
    counts_r: int32, number of listed tokens, 0 at first.
    totals_r: int64, units of all tokens up to the floor, 0 at first.
    below_r: int64, units of the tokens up to kept_r, 0 if that is -1; unused without top_p.
    histograms: int64, BINS of each row, 0 at first.
    """

    top_r: Tensor
    kept_r: Tensor
    bound_r: Tensor
    counts_r: Tensor
    totals_r: Tensor
    below_r: Tensor
    histograms: Tensor


def pick(
    logits_NV: Tensor,
    at_n: Tensor,
    part: "KernelPart",
    blocks: tuple[Tensor, Tensor],
    positions_N: Tensor | None,
    token_ids_N: Tensor,
) -> Bounds | None:
    """Write token_ids_N[part.at_n], int64: -1 if a row has no finite largest logit.  Returns bounds if it has cuts.

    at_n: int64, rows of logits_NV.  blocks: from ``measure_blocks``.  positions_N: int64, indexed like token_ids_N by
    the rows of the batch; None if all are greedy.
    """
    num_rows, num_blocks = blocks[0].shape
    unused = token_ids_N  # never read or written: without cuts the kernel's variant has no access to it
    cuts: tuple[Tensor, ...] = (unused,) * 4
    bounds, cut_rows = None, part.cut_rows
    if cut_rows is not None:
        cuts = (cut_rows.index_n, cut_rows.floor_r, cut_rows.top_k_r, cut_rows.top_p_r)
        num_cut, device = len(cut_rows.at_r), logits_NV.device
        numbers = torch.full((4, num_cut), -1, dtype=torch.int32, device=device)
        top_r, kept_r, bound_r, counts_r = numbers.unbind()
        sums = torch.empty((BINS.value + 2) * num_cut, dtype=torch.int64, device=device)
        histograms, totals_r, below_r = sums.split((BINS.value * num_cut, num_cut, num_cut))
        bounds = Bounds(top_r.view(torch.float32), kept_r, bound_r, counts_r, totals_r, below_r, histograms)
    pick_row[(num_rows,)](
        logits_NV, logits_NV.stride(0), at_n, part.at_n, blocks[0], blocks[1],
        part.inverse_temperature_n, part.seeds_n,
        unused if positions_N is None else positions_N, token_ids_N, *cuts, *(bounds or (unused,) * 7),
        logits_NV.shape[1], num_blocks,
        DRAWS=positions_N is not None, CUTS=cut_rows is not None,
        BLOCK_C=triton.next_power_of_2(num_blocks), BLOCK_B=BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return bounds


@triton.jit(
    do_not_specialize_on_alignment=[
        "at", "out_at", "tops", "sums", "inverse_temperature", "seeds", "positions", "out", "cut_index", "floors",
        "top_ks", "top_ps", "cut_tops", "kept", "bounds", "counts", "totals", "below",
    ]
)  # fmt: skip
def pick_row(
    logits, row_stride, at, out_at, tops, sums, inverse_temperature, seeds, positions, out, cut_index, floors,
    top_ks, top_ps, cut_tops, kept, bounds, counts, totals, below, histograms, vocab_size, num_blocks,
    DRAWS: tl.constexpr, CUTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Pick one row's token per program."""
    n = tl.program_id(0)
    c_C = tl.arange(0, BLOCK_C)
    inside_C = c_C < num_blocks
    place_C = n.to(tl.int64) * num_blocks + c_C
    top_C = tl.load(tops + place_C, mask=inside_C, other=-float("inf"))
    top = tl.max(top_C, 0)
    failed = tl.max((top_C != top_C).to(tl.int32), 0) > 0
    failed = failed | (tl.abs(top) == float("inf"))
    of_row = logits + tl.load(at + n) * row_stride
    out_row = tl.load(out_at + n)
    b_B = tl.arange(0, BLOCK_B)

    # The lowest id among equals: the first block that has the largest, and in it the first token.
    block = tl.minimum(tl.min(tl.where(top_C == top, c_C, BLOCK_C), 0), num_blocks - 1)
    v_B = block * BLOCK_B + b_B
    logit_B = tl.load(of_row + v_B, mask=v_B < vocab_size, other=-float("inf")).to(tl.float32)
    token = tl.min(tl.where(logit_B == top, v_B, vocab_size), 0)
    if DRAWS:
        # A greedy row, with inverse 0, runs this in vain, which costs less than a branch for each row.
        inverse = tl.load(inverse_temperature + n)
        number = uniform(tl.load(seeds + n), tl.load(positions + out_row))
        sum_C = tl.load(sums + place_C, mask=inside_C, other=0.0)
        # exp(-inf - top): a block without a finite logit weighs nothing.
        weight_C = (sum_C * tl.exp((top_C - top) * inverse)).to(tl.float64)
        total_C = tl.cumsum(weight_C, 0)
        total = tl.max(total_C, 0)
        target = number * total
        block = first_above(total_C, weight_C, target, c_C, BLOCK_C)
        before = tl.sum(tl.where(c_C == block, total_C - weight_C, 0.0), 0)
        v_B = block * BLOCK_B + b_B
        logit_B = tl.load(of_row + v_B, mask=v_B < vocab_size, other=-float("inf")).to(tl.float32)
        weight_B = tl.exp((logit_B - top) * inverse).to(tl.float64)
        total_B = tl.cumsum(weight_B, 0)
        offset = first_above(total_B, weight_B, tl.maximum(target - before, 0.0), b_B, BLOCK_B)
        token = tl.where(inverse > 0, block * BLOCK_B + offset, token)
    failing = failed
    if CUTS:
        cut = tl.load(cut_index + n)
        if cut >= 0:
            # Its token is not found yet, so it gets -1 for now.
            failing = cut >= 0
            bound = tl.minimum(tl.load(floors + cut), LEAST)
            top_k = tl.load(top_ks + cut)
            if (top_k > 0) & (top_k <= num_blocks):
                # The k blocks with the likeliest tops have k tokens that are at least as likely as the bound.
                magnitude_C = tl.where(inside_C, magnitude((top_C - top) * inverse), 0x7FFFFFFF)
                low = top_k * 0
                while low < bound:
                    middle = low + (bound - low) // 2
                    if tl.sum((magnitude_C <= middle).to(tl.int32), 0) >= top_k:
                        bound = middle
                    else:
                        low = middle + 1
            top_p = tl.load(top_ps + cut)
            whole = (top_p < 1.0) & (top_k == 0) & (tl.load(floors + cut) >= LEAST) & (failed == 0)
            if whole:
                # All tokens with less than (1 - top_p) / V of the weight have less than 1 - top_p of it together, so
                # every kept token has more.  The factor e covers every rounding.
                share = (1.0 - top_p) * total / vocab_size
                score = tl.log(tl.maximum(share.to(tl.float32), 1e-30)) - 1.0
                bound = tl.minimum(bound, magnitude(tl.minimum(score, 0.0)))
            tl.store(cut_tops + cut, top)
            tl.store(kept + cut, tl.where((top_k > 0) | (top_p < 1.0), -1, bound))
            tl.store(bounds + cut, tl.where(failed, -1, bound))
            tl.store(counts + cut, 0)
            tl.store(totals + cut, 0)
            tl.store(below + cut, 0)
            tl.store(histograms + cut * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
    tl.store(out + out_row, tl.where(failing, -1, token.to(tl.int64)))


@triton.jit
def first_above(total_K, weight_K, target, k_K, NUM: tl.constexpr):
    """Return the index of the first running total above the target, else of the last weight, as in ``draw.py``.

    Totals that many threads sum may differ in the last bit even if nothing is added, so an index without weight is
    skipped.  0 if there is no weight at all, as in a row of NaN.
    """
    weighs_K = weight_K > 0
    first = tl.min(tl.where(weighs_K & (total_K > target), k_K, NUM), 0)
    last = tl.max(tl.where(weighs_K, k_K, 0), 0)
    return tl.minimum(first, last)
