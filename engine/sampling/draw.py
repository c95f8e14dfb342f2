"""Drawing of one index per row with probability proportional to its weight: inverse CDF in vocabulary order.

Legend: N sampled rows · n rows of a part · V vocabulary · W vocabulary rounded up to whole blocks · C blocks
  B block size
Owns: the uniform number of each token, the padded layout and the search.  Does not know: which tokens were cut.

The uniform number is a pure function of (seed, position): SplitMix64 (Steele, Lea, Flood 2014) used as a counter, and
the number is output ``position`` of the stream that starts at the hashed seed.  No state is kept, so a sequence that is
moved to another row, retracted and resumed, or sampled on another rank draws the same numbers.

A cumulative sum over the vocabulary would write and read every weight again.  Here block sums are computed in one read,
the search runs over them, and only the block with the answer is summed in full.  All arithmetic is per row, so a draw
does not depend on the other rows.
"""

from typing import Final

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit integers: torch has no unsigned arithmetic, and products
# wrap modulo 2**64 either way.
STRIDE: Final = 0x9E3779B97F4A7C15 - (1 << 64)
FACTOR_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
FACTOR_2: Final = 0x94D049BB133111EB - (1 << 64)
BLOCK: Final = 512
# Weights below e**-80 are zero; a uniform number of 52 bits cannot resolve them.
_LOWEST_SCORE: Final = -80.0
_LOWEST_WEIGHT: Final = 1.9e-35


def stream_starts(seeds_N: Tensor) -> Tensor:
    """Return where each seed's stream starts; int64 to int64.

    It is a hash of the seed: of raw seeds, two that differ by a multiple of the stride would share a shifted stream.
    """
    return _mixed(seeds_N)


def uniforms(starts_N: Tensor, positions_N: Tensor) -> Tensor:
    """Return float64 numbers strictly between 0 and 1, equal on every device.  Both arguments are int64."""
    bits_N = (_mixed(starts_N + positions_N * STRIDE) >> 12) & ((1 << 52) - 1)
    # 52 bits and a half fit a float64 exactly, so no draw rounds to 0 or 1.
    return (bits_N.to(torch.float64) + 0.5) * 2.0**-52


def _mixed(x_N: Tensor) -> Tensor:
    # torch shifts arithmetically; the masks turn that into the logical shift the hash is defined with.
    x_N = (x_N ^ ((x_N >> 30) & ((1 << 34) - 1))) * FACTOR_1
    x_N = (x_N ^ ((x_N >> 27) & ((1 << 37) - 1))) * FACTOR_2
    return x_N ^ ((x_N >> 31) & ((1 << 33) - 1))


def padded_width(vocab_size: int) -> int:
    """Return W of a vocabulary."""
    return -(-vocab_size // BLOCK) * BLOCK


def padded_scores(logits_nV: Tensor, top_n: Tensor, inverse_temperature_n: Tensor) -> Tensor:
    """Return scores_nW = (logit - top) / temperature in float32, at most 0; -inf in the padding.

    top_n: each row's largest logit.  Rows whose top is not finite become NaN or -inf; other rows are not affected.
    """
    n, vocab_size = logits_nV.shape
    scores_nW = torch.empty((n, padded_width(vocab_size)), dtype=torch.float32, device=logits_nV.device)
    scores_nW[:, vocab_size:].fill_(-torch.inf)
    inside_nV = scores_nW[:, :vocab_size]
    torch.sub(logits_nV, top_n.to(torch.float32)[:, None], out=inside_nV)
    inside_nV.mul_(inverse_temperature_n[:, None])
    return scores_nW


def weights(scores_nW: Tensor) -> Tensor:
    """Return exp(score): the probabilities up to a factor per row."""
    if scores_nW.device.type != "cpu":
        return scores_nW.exp()
    # A result that underflows costs the CPU's exp up to 30 times as much: 2.9 instead of 0.1 ms for 152 k scores,
    # which temperatures of 0.3 and less produce.  The clamp and the threshold cost 0.03.
    return torch.threshold_(scores_nW.clamp(min=_LOWEST_SCORE).exp_(), _LOWEST_WEIGHT, 0.0)


def block_sums(weights_nW: Tensor) -> Tensor:
    """Return sums_nC, float32, added in torch's order."""
    return weights_nW.view(len(weights_nW), -1, BLOCK).sum(dim=-1)


def draw(weights_nW: Tensor, uniforms_n: Tensor) -> Tensor:
    """Return an int64 index per row, in range and never of weight 0; 0 for a row of NaN."""
    n, width = weights_nW.shape
    weights_nCB = weights_nW.view(n, width // BLOCK, BLOCK)
    sums_nC = block_sums(weights_nW).to(torch.float64)
    cumulative_nC = sums_nC.cumsum(dim=-1)
    target_n1 = uniforms_n[:, None] * cumulative_nC[:, -1:]
    block_n1 = _first_above(cumulative_nC, target_n1)
    before_n1 = cumulative_nC.gather(1, block_n1) - sums_nC.gather(1, block_n1)
    block_nB = weights_nCB.gather(1, block_n1[:, :, None].expand(n, 1, BLOCK)).squeeze(1)
    offset_n1 = _first_above(block_nB.to(torch.float64).cumsum(dim=-1), (target_n1 - before_n1).clamp(min=0.0))
    return (block_n1 * BLOCK + offset_n1).squeeze(1)


def _first_above(cumulative_nK: Tensor, target_n1: Tensor) -> Tensor:
    """Return the first index whose cumulative sum exceeds the target, else the last one that added weight.

    Such an index has weight > 0: the sum grew there.  The second case is due to rounding: a block's float32 sum and
    the float64 sum of its members differ in the last digits, so a target may exceed both.
    """
    above_n1 = (cumulative_nK <= target_n1).sum(dim=-1, keepdim=True)
    last_n1 = (cumulative_nK < cumulative_nK[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(above_n1, last_n1)
