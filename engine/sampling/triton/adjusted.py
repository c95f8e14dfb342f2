"""Logits of adjusted rows, with bias, penalties and suppressed stop tokens: one read, one write.

Legend: n rows of a part · P penalties · V vocabulary · C lines of token counts · E entries of all rows' lists
Owns: the formulas, in the order of ``engine/sampling/sampler.py``.  Does not know: what is drawn afterwards.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.penalties import NO_PENALTIES

TOKENS_OF_A_PROGRAM = 4096
ENTRIES_AT_ONCE = 128


class Adjustment(NamedTuple):
    """Changes to the logits of n rows, in the order of the kernel's arguments.

    lines_n: int32, each row's line of counts, -1 for none.  penalties_nP: float32, row by row.
    bias_starts_m, hold_starts_m: int32 [n + 1], start of each row's entries in bias_ids_E and hold_ids_E, int32.
    bias_E: float32.
    """

    lines_n: Tensor
    penalties_nP: Tensor
    bias_starts_m: Tensor
    bias_ids_E: Tensor
    bias_E: Tensor
    hold_starts_m: Tensor
    hold_ids_E: Tensor


def adjusted_logits(logits_NV: Tensor, at_n: Tensor, counts_CV: Tensor, adjustment: Adjustment) -> Tensor:
    """Return float32 [n, V]: row at_n[i] of the logits with the changes of row i.

    at_n: int64.  counts_CV: see ``engine/sampling/penalties.py``; may have no lines if no row is penalised.
    A row without a finite maximum still has none afterwards: a NaN or infinite logit stays, even of a suppressed
    token.
    """
    vocab_size = logits_NV.shape[1]
    adjusted_nV = torch.empty((len(at_n), vocab_size), dtype=torch.float32, device=logits_NV.device)
    adjust_tokens[(triton.cdiv(vocab_size, TOKENS_OF_A_PROGRAM), len(at_n))](
        logits_NV, logits_NV.stride(0), at_n, counts_CV, *adjustment, adjusted_nV, vocab_size,
        NUM_PENALTIES=len(NO_PENALTIES), BLOCK_V=TOKENS_OF_A_PROGRAM, BLOCK_E=ENTRIES_AT_ONCE,
        num_warps=8, enable_fp_fusion=False,  # one rounding per operation, as torch does it
    )  # fmt: skip
    return adjusted_nV


@triton.jit(
    do_not_specialize_on_alignment=[
        "at", "lines", "penalties", "bias_starts", "bias_ids", "bias", "hold_starts", "hold_ids",
    ]
)  # fmt: skip
def adjust_tokens(
    logits, row_stride, at, counts, lines, penalties, bias_starts, bias_ids, bias, hold_starts, hold_ids, out,
    vocab_size, NUM_PENALTIES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Adjust some neighbouring tokens of one row per program, with the entries of the row's lists among them."""
    n = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_V
    of_row = logits + tl.load(at + n) * row_stride
    of_out = out + n.to(tl.int64) * vocab_size
    line = tl.load(lines + n)
    counted_size = tl.where(line >= 0, vocab_size, 0)
    of_counts = counts + line.to(tl.int64) * vocab_size
    of_penalties = penalties + n * NUM_PENALTIES  # in the order of NO_PENALTIES
    factor = tl.load(of_penalties)
    once = tl.load(of_penalties + 1)
    each = tl.load(of_penalties + 2)

    v_V = first + tl.arange(0, BLOCK_V)
    live_V = v_V < vocab_size
    logit_V = tl.load(of_row + v_V, mask=live_V, other=0.0).to(tl.float32)
    count_V = tl.load(of_counts + v_V, mask=v_V < counted_size, other=0).to(tl.int32)
    tl.store(of_out + v_V, penalised(logit_V, count_V, factor, once, each), mask=live_V)

    # Bias comes before the penalties, so its tokens are computed again from the start.
    tl.debug_barrier()
    end = tl.load(bias_starts + n + 1)
    for start in range(tl.load(bias_starts + n), end, BLOCK_E):
        e_E = start + tl.arange(0, BLOCK_E)
        v_E = tl.load(bias_ids + e_E, mask=e_E < end, other=-1)
        here_E = (v_E >= first) & (v_E < first + BLOCK_V)
        logit_E = tl.load(of_row + v_E, mask=here_E, other=0.0).to(tl.float32)
        logit_E += tl.load(bias + e_E, mask=here_E, other=0.0)
        count_E = tl.load(of_counts + v_E, mask=here_E & (v_E < counted_size), other=0).to(tl.int32)
        tl.store(of_out + v_E, penalised(logit_E, count_E, factor, once, each), mask=here_E)
    tl.debug_barrier()
    end = tl.load(hold_starts + n + 1)
    for start in range(tl.load(hold_starts + n), end, BLOCK_E):
        e_E = start + tl.arange(0, BLOCK_E)
        v_E = tl.load(hold_ids + e_E, mask=e_E < end, other=-1)
        here_E = (v_E >= first) & (v_E < first + BLOCK_V)
        logit_E = tl.load(of_row + v_E, mask=here_E, other=0.0).to(tl.float32)
        # The lowest finite number, not -inf: a row that allows only EOS then ends instead of failing.
        finite_E = tl.abs(logit_E) < float("inf")
        tl.store(of_out + v_E, tl.where(finite_E, -3.4028234663852886e38, logit_E), mask=here_E)


@triton.jit
def penalised(logit, count, factor, once, each):
    """Apply repetition, frequency and presence as ``Penalties.apply`` does.  count: an entry of ``TokenCounts``."""
    scaled = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
    logit = tl.where(count > 0, scaled, logit)
    times = count >> 1
    logit -= each * times.to(tl.float32)
    return logit - once * tl.minimum(times, 1).to(tl.float32)
