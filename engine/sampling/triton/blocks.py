"""The pass over all logits: each block's largest logit and its sum of weights.

Legend: n rows of a part · V vocabulary · C blocks of a row · B block size
Owns: the pass.  Does not know: what is drawn.

The later kernels need only these numbers and one block of the row, unless the row has cuts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.draw import BLOCK

BLOCKS_OF_A_PROGRAM = 8


def measure_blocks(
    logits_NV: Tensor, at_n: Tensor, inverse_temperature_n: Tensor, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Return (top_nC, sum_nC), float32: the largest logit of each block, NaN if it has one; and the sum of
    exp((logit - the block's largest) * inverse temperature), not written without ``with_sums``.

    at_n: int64, the rows of logits_NV.  logits_NV: any floating-point dtype, contiguous within a row.
    """
    assert logits_NV.stride(1) == 1, "the tokens of a row must be contiguous"
    num_rows, vocab_size = len(at_n), logits_NV.shape[1]
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    measured = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits_NV.device)
    measure_some_blocks[(triton.cdiv(num_blocks, BLOCKS_OF_A_PROGRAM), num_rows)](
        logits_NV, logits_NV.stride(0), at_n, inverse_temperature_n, measured[0], measured[1], vocab_size,
        num_blocks,
        WITH_SUMS=with_sums, BLOCK_C=BLOCKS_OF_A_PROGRAM, BLOCK_B=BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return measured[0], measured[1]


@triton.jit(do_not_specialize_on_alignment=["at", "inverse_temperature", "tops", "sums"])
def measure_some_blocks(
    logits, row_stride, at, inverse_temperature, tops, sums, vocab_size, num_blocks,
    WITH_SUMS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Measure some neighbouring blocks of one row per program."""
    n = tl.program_id(1)
    block_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    v_CB = block_C[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
    of_row = logits + tl.load(at + n) * row_stride
    logit_CB = tl.load(of_row + v_CB, mask=v_CB < vocab_size, other=-float("inf")).to(tl.float32)
    top_C = tl.max(logit_CB, 1)
    # tl.max ignores NaN.
    broken_C = tl.max((logit_CB != logit_CB).to(tl.int32), 1) > 0
    place_C = n.to(tl.int64) * num_blocks + block_C
    tl.store(tops + place_C, tl.where(broken_C, float("nan"), top_C), mask=block_C < num_blocks)
    if WITH_SUMS:
        # If a whole block is -inf, -inf - -inf would be NaN.
        base_C = tl.where(top_C == -float("inf"), 0.0, top_C)
        weight_CB = tl.exp((logit_CB - base_C[:, None]) * tl.load(inverse_temperature + n))
        tl.store(sums + place_C, tl.sum(weight_CB, 1), mask=block_C < num_blocks)
