"""One uniform number per sampled token, a pure function of (seed, position).

Legend: N sampled rows
Owns: the hash.  Does not know: logits, batches, what the number decides.

The generator is SplitMix64 (Steele, Lea, Flood 2014) used as a counter: output number ``position`` of the
stream that starts at the mixed seed.  No state is kept, so a sequence that is moved to another row, retracted
and resumed, or sampled on another rank draws the same numbers.
"""

from typing import Final

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit integers: torch has no unsigned arithmetic, and products
# wrap modulo 2**64 either way.
STRIDE: Final = 0x9E3779B97F4A7C15 - (1 << 64)
FACTOR_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
FACTOR_2: Final = 0x94D049BB133111EB - (1 << 64)


def stream_starts(seeds_N: Tensor) -> Tensor:
    """Where each seed's stream starts; int64 to int64.

    A hash of the seed: with raw seeds, two that differ by a multiple of the stride would share a shifted stream.
    """
    return _mixed(seeds_N)


def uniforms(starts_N: Tensor, positions_N: Tensor) -> Tensor:
    """float64 numbers strictly between 0 and 1, the same on every device.  Both arguments are int64."""
    bits_N = (_mixed(starts_N + positions_N * STRIDE) >> 12) & ((1 << 52) - 1)
    # 52 bits and a half fit a float64 exactly, so no draw rounds to 0 or 1.
    return (bits_N.to(torch.float64) + 0.5) * 2.0**-52


def _mixed(x_N: Tensor) -> Tensor:
    # torch shifts arithmetically; the masks turn that into the logical shift the hash is defined with.
    x_N = (x_N ^ ((x_N >> 30) & ((1 << 34) - 1))) * FACTOR_1
    x_N = (x_N ^ ((x_N >> 27) & ((1 << 37) - 1))) * FACTOR_2
    return x_N ^ ((x_N >> 31) & ((1 << 33) - 1))
