"""Lookup in a vocabulary table that is cut over ranks: one launch, with zeros for rows of other ranks.

Legend: T tokens · D model dim · V rows of this rank
Owns: the gather.  Does not know: the sum over ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

COLUMNS = 1024


def embed_shard(token_ids_T: Tensor, table_VD: Tensor, first: int) -> Tensor:
    """Return x_TD: row ``id - first`` of the table, or zeros if it has no such row.  token_ids_T: int64."""
    (num_tokens,), (num_rows, width) = token_ids_T.shape, table_VD.shape
    x_TD = torch.empty((num_tokens, width), dtype=table_VD.dtype, device=table_VD.device)
    if num_tokens:
        block = min(COLUMNS, triton.next_power_of_2(width))
        per_token = triton.cdiv(width, block)
        # On one axis, since only the first axis of a grid may exceed 65,535.
        gather_rows[(num_tokens * per_token,)](
            token_ids_T, table_VD, x_TD, first, num_rows,
            WIDTH=width, PROGRAMS=per_token, BLOCK_D=block,
            num_warps=max(1, block // 256), enable_fp_fusion=True, **launch_options(table_VD.device),
        )  # fmt: skip
    return x_TD


@triton.jit(do_not_specialize=["first", "num_rows"], do_not_specialize_on_alignment=["token_ids"])
def gather_rows(
    token_ids, table, out, first, num_rows,
    WIDTH: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy some columns of one token per program."""
    program = tl.program_id(0)
    token = (program // PROGRAMS).to(tl.int64)
    d_D = (program % PROGRAMS) * BLOCK_D + tl.arange(0, BLOCK_D)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    row = tl.load(token_ids + token) - first
    held_width = tl.where((row >= 0) & (row < num_rows), WIDTH, 0)
    row_D = tl.load(table + row * WIDTH + d_D, mask=d_D < held_width, other=0.0)
    tl.store(out + token * WIDTH + d_D, row_D, mask=d_D < WIDTH)
