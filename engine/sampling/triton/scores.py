"""How candidates are compared and weighed: magnitudes of scores, and weights as integers.

Legend: a score is (logit - the row's largest) * inverse temperature, at most 0
Owns: the two number formats, and counting over a row's candidates.  Does not know: which cuts there are.

The bits of a score's magnitude, as an integer, order scores from the most likely down.  Weights are counted in units
of 2**-40 of the most likely token's, as ``engine/sampling/cuts.py`` counts them: sums of integers do not depend on the
order of summation, so candidates may lie in any order, and no draw depends on which program was first.
"""

import triton
import triton.language as tl

UNITS: tl.constexpr = tl.constexpr(float(1 << 40))
# The magnitude of -27.8: below e**-27.8 a weight is 0 units.
LEAST: tl.constexpr = tl.constexpr(0x41DE6666)
# Where a row's total of units starts if all its tokens are counted, not its candidates alone: below 0 with all of them.
COUNTED: tl.constexpr = tl.constexpr(-(1 << 62))


@triton.jit
def magnitude(score):
    """int32: the smaller, the likelier."""
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def units(magnitudes):
    """int64: exp(score) in units."""
    return (tl.exp(-magnitudes.to(tl.float32, bitcast=True)) * UNITS).to(tl.int64)


@triton.jit
def count_up_to(magnitudes, num_candidates, limit, TILE: tl.constexpr):
    """How many candidates have at most that magnitude; int32."""
    count_T = tl.zeros([TILE], tl.int32)
    for start in range(0, num_candidates, TILE):
        t_T = start + tl.arange(0, TILE)
        magnitude_T = tl.load(magnitudes + t_T, mask=t_T < num_candidates, other=0x7FFFFFFF)
        count_T += (magnitude_T <= limit).to(tl.int32)
    return tl.sum(count_T, 0)


@triton.jit
def units_up_to(magnitudes, ids, num_candidates, limit, last_id, TILE: tl.constexpr):
    """Units of the candidates of at most that magnitude and that id; int64."""
    units_T = tl.zeros([TILE], tl.int64)
    for start in range(0, num_candidates, TILE):
        t_T = start + tl.arange(0, TILE)
        magnitude_T = tl.load(magnitudes + t_T, mask=t_T < num_candidates, other=0x7F800000)
        id_T = tl.load(ids + t_T, mask=t_T < num_candidates, other=0x7FFFFFFF)
        units_T += tl.where((magnitude_T <= limit) & (id_T <= last_id), units(magnitude_T), 0)
    return tl.sum(units_T, 0)
