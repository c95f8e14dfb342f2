"""The number formats of candidates: magnitudes of scores, and weights as integers.

Legend: a score is (logit - the row's largest) * inverse temperature, at most 0
Owns: the two number formats, the bins of a histogram over them, and where the sum over a list reaches a number.
Does not know: which cuts there are.

The bits of a score's magnitude, as an integer, order scores from the most likely down.  Weights are in units of 2**-40
of the most likely token's, as in ``engine/sampling/cuts.py``: sums of integers do not depend on their order, so
candidates may be in any order, and no draw depends on which program ran first.
"""

import triton
import triton.language as tl

UNITS: tl.constexpr = tl.constexpr(float(1 << 40))
# The magnitude of -27.8: below e**-27.8 a weight is 0 units.
LEAST: tl.constexpr = tl.constexpr(0x41DE6666)
BINS: tl.constexpr = tl.constexpr(1 << 11)
# A bin has 2**15 neighbouring magnitudes, a number's 2**-8, so the bins reach from a bound to its 256th part.
BIN_BITS: tl.constexpr = tl.constexpr(15)


@triton.jit
def magnitude(score):
    """Return the score's magnitude, int32: smaller is likelier."""
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def units(magnitudes):
    """Return exp(score) in units, int64."""
    return (tl.exp(-magnitudes.to(tl.float32, bitcast=True)) * UNITS).to(tl.int64)


@triton.jit
def has_far_cut(top_k, top_p, num_blocks):
    """Return whether a row's cut may be far from what the largest logits of its blocks say: it needs a histogram."""
    return ((top_k == 0) & (top_p < 1.0)) | (top_k > num_blocks)


@triton.jit
def bin_of(magnitudes, bound):
    """Return the bins of magnitudes up to the bound, which is the last of the last bin; bin 0 has all that remain."""
    return tl.maximum(-((bound - magnitudes) >> BIN_BITS) + (BINS - 1), 0)


@triton.jit
def bin_reaching(histogram, target, bound):
    """Return (before, last, sum before) of the bin in which the sum from bin 0 on reaches the target.

    before, last: int32, the largest magnitudes of the bin in front of it, -1 for none, and of itself.  It is the last
    bin if the sum does not reach the target.  histogram: int64, BINS long.
    """
    b_B = tl.arange(0, BINS)
    amount_B = tl.load(histogram + b_B)
    found = tl.min(tl.where(tl.cumsum(amount_B, 0) >= target, b_B, BINS - 1), 0)
    last = bound + ((found - (BINS - 1)) << BIN_BITS)
    before = tl.where(found > 0, bound + ((found - BINS) << BIN_BITS), -1)
    return before, last, tl.sum(tl.where(b_B < found, amount_B, 0), 0)


@triton.jit
def listed(tokens, start, num, TILE: tl.constexpr):
    """Return (magnitudes, ids), int32, of a list's tokens from ``start`` on; they are the largest behind its end.

    tokens: int64, each a magnitude above the 32 bits of an id."""
    t_T = start + tl.arange(0, TILE)
    token_T = tl.load(tokens + t_T, mask=t_T < num, other=0x7F8000007FFFFFFF)
    return (token_T >> 32).to(tl.int32), token_T.to(tl.int32)


@triton.jit
def listed_sum(tokens, num, limit, end, WEIGHED: tl.constexpr, TILE: tl.constexpr):
    """Return the sum over a list's tokens of magnitudes up to ``limit`` and ids below ``end``, int64.

    WEIGHED: whether units are summed; else tokens are counted."""
    amount_T = tl.zeros([TILE], tl.int64)
    for start in range(0, num, TILE):
        magnitude_T, id_T = listed(tokens, start, num, TILE)
        one_T = units(magnitude_T) if WEIGHED else tl.full([TILE], 1, tl.int64)
        amount_T += tl.where((magnitude_T <= limit) & (id_T < end), one_T, 0)
    return tl.sum(amount_T, 0)


@triton.jit
def magnitude_reaching(tokens, num, limit, target, WEIGHED: tl.constexpr, TILE: tl.constexpr):
    """Return the least magnitude up to which the sum over the list is the target; the largest one if it is less.

    Magnitudes beyond the limit, which is returned if there are no others, do not count.  The search halves the range
    that the list has, so it takes fewer passes over a list of a bin than over one of all magnitudes, and one over ties.
    """
    low_T = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    high_T = tl.full([TILE], -1, tl.int32)
    for start in range(0, num, TILE):
        magnitude_T, _ = listed(tokens, start, num, TILE)
        low_T = tl.minimum(low_T, magnitude_T)
        high_T = tl.maximum(high_T, tl.where(magnitude_T <= limit, magnitude_T, -1))
    low = tl.min(low_T, 0)
    high = tl.max(high_T, 0)
    while low < high:
        middle = low + (high - low) // 2
        if listed_sum(tokens, num, middle, 0x7FFFFFFF, WEIGHED, TILE) >= target:
            high = middle
        else:
            low = middle + 1
    return tl.minimum(low, limit)
