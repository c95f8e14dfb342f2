"""The sampler's uniform numbers inside kernels: the same bits as ``engine/sampling/draw.py``.

Owns: the hash for kernels.  Does not know: what the number decides.
"""

import triton
import triton.language as tl

from engine.sampling import draw

STRIDE: tl.constexpr = tl.constexpr(draw.STRIDE)
FACTOR_1: tl.constexpr = tl.constexpr(draw.FACTOR_1)
FACTOR_2: tl.constexpr = tl.constexpr(draw.FACTOR_2)


@triton.jit
def uniform(seed, position):
    """Return a float64 strictly between 0 and 1 for (seed, position), both int64."""
    bits = (mixed(mixed(seed) + position * STRIDE) >> 12) & 0xFFFFFFFFFFFFF
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52


@triton.jit
def mixed(x):
    """Return SplitMix64's finaliser of x; the masks make logical shifts from arithmetic ones."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FACTOR_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * FACTOR_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
