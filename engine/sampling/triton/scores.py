"""The number formats of candidates: magnitudes of scores, and weights as integers.

Legend: a score is (logit - the row's largest) * inverse temperature, at most 0
Owns: the two number formats, sums over a row's candidates, and where such a sum reaches a number.
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
# Start of a row's total of units if all its tokens are counted, not just candidates; it stays below 0 with all of them.
COUNTED: tl.constexpr = tl.constexpr(-(1 << 62))
BINS: tl.constexpr = tl.constexpr(1 << 11)


@triton.jit
def magnitude(score):
    """Return the score's magnitude, int32: smaller is likelier."""
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def units(magnitudes):
    """Return exp(score) in units, int64."""
    return (tl.exp(-magnitudes.to(tl.float32, bitcast=True)) * UNITS).to(tl.int64)


@triton.jit
def units_up_to(magnitudes, num_candidates, limit, TILE: tl.constexpr):
    """Return the units of the candidates of at most that magnitude, int64."""
    units_T = tl.zeros([TILE], tl.int64)
    for start in range(0, num_candidates, TILE):
        t_T = start + tl.arange(0, TILE)
        magnitude_T = tl.load(magnitudes + t_T, mask=t_T < num_candidates, other=0x7F800000)
        units_T += tl.where(magnitude_T <= limit, units(magnitude_T), 0)
    return tl.sum(units_T, 0)


@triton.jit
def digit_reaching(
    keys, magnitudes, num_candidates, limit, prefix, target, histogram,
    SHIFT: tl.constexpr, BITS: tl.constexpr, WEIGHED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (digit, sum below it), int32 and int64, for the candidates whose key begins with ``prefix``.

    It is the next digit of the key at which the sum from digit 0 on reaches the target; the largest if it does not.
    keys: int32, not negative.  limit: candidates of larger magnitudes do not count.
    WEIGHED: whether units are summed; else candidates are counted.  histogram: int64, BINS long, of this program."""
    b_B = tl.arange(0, 1 << BITS)
    # All threads must have read the former content.
    tl.debug_barrier()
    tl.store(histogram + b_B, tl.zeros([1 << BITS], tl.int64))
    tl.debug_barrier()
    for start in range(0, num_candidates, TILE):
        t_T = start + tl.arange(0, TILE)
        inside_T = t_T < num_candidates
        magnitude_T = tl.load(magnitudes + t_T, mask=inside_T, other=0x7F800000)
        key_T = tl.load(keys + t_T, mask=inside_T, other=0)
        counted_T = inside_T & (magnitude_T <= limit) & ((key_T >> SHIFT >> BITS) == prefix)
        amount_T = units(magnitude_T) if WEIGHED else tl.full([TILE], 1, tl.int64)
        tl.atomic_add(histogram + ((key_T >> SHIFT) & ((1 << BITS) - 1)), amount_T, mask=counted_T)
    tl.debug_barrier()
    amount_B = tl.load(histogram + b_B)
    digit = tl.min(tl.where(tl.cumsum(amount_B, 0) >= target, b_B, (1 << BITS) - 1), 0)
    return digit, tl.sum(tl.where(b_B < digit, amount_B, 0), 0)


@triton.jit
def magnitude_reaching(magnitudes, num_candidates, limit, target, histogram, WEIGHED: tl.constexpr, TILE: tl.constexpr):
    """Return the least magnitude up to which the candidates' sum is the target; ``limit`` if their sum is less.

    The 31 bits are three digits, found in one pass over the candidates each (``digit_reaching``)."""
    high, below = digit_reaching(
        magnitudes, magnitudes, num_candidates, limit, 0, target, histogram, 20, 11, WEIGHED, TILE
    )
    target -= below
    middle, below = digit_reaching(
        magnitudes, magnitudes, num_candidates, limit, high, target, histogram, 9, 11, WEIGHED, TILE
    )
    target -= below
    found = (high << 11) | middle
    low, below = digit_reaching(
        magnitudes, magnitudes, num_candidates, limit, found, target, histogram, 0, 9, WEIGHED, TILE
    )
    return tl.minimum((found << 9) | low, limit)


@triton.jit
def id_reaching(ids, magnitudes, num_candidates, limit, target, histogram, TILE: tl.constexpr):
    """Return the least id up to which the candidates' units are the target.  Ids have two digits, up to 2**22."""
    high, below = digit_reaching(ids, magnitudes, num_candidates, limit, 0, target, histogram, 11, 11, True, TILE)
    low, below = digit_reaching(
        ids, magnitudes, num_candidates, limit, high, target - below, histogram, 0, 11, True, TILE
    )
    return (high << 11) | low
