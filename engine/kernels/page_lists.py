"""The pages of a batch's rows as one list, made on the device; FlashInfer reads it instead of a page table.

Legend: B rows · P page-table width · I entries of all lists
Owns: one launch.  Does not know: readers of the list, which rows these are.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, wait_for_previous

ROWS_AT_ONCE = 256
PAGES_AT_ONCE = 256


def list_pages(
    table_BP: Tensor, lengths_B: Tensor, page_size: int, starts_B1: Tensor, last_B: Tensor, pages_I1: Tensor
) -> None:
    """Write each row's pages to pages_I1[starts[b]:starts[b + 1]], and the number of tokens in its last page.

    All are int32 and contiguous, but table rows may have gaps.  lengths_B: tokens, at least 1.  starts_B1[0] must be 0.
    """
    num_rows = len(lengths_B)
    list_row[(num_rows,)](
        table_BP, lengths_B, starts_B1, last_B, pages_I1, num_rows, table_BP.stride(0),
        PAGE_SIZE=page_size, BLOCK_B=ROWS_AT_ONCE, BLOCK_W=PAGES_AT_ONCE,
        num_warps=2, enable_fp_fusion=True, **launch_options(table_BP.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def list_row(
    table, lengths, starts, last, pages, num_rows, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one row's list per program; each program counts the pages of the rows before its own."""
    place = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    before_B = tl.zeros([BLOCK_B], dtype=tl.int32)
    for first in range(0, place, BLOCK_B):
        b_B = first + tl.arange(0, BLOCK_B)
        before_B += (tl.load(lengths + b_B, mask=b_B < place, other=0) + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(before_B, 0)
    length = tl.load(lengths + place)
    count = (length + PAGE_SIZE - 1) // PAGE_SIZE
    tl.store(starts + place + 1, start + count)
    tl.store(last + place, length - (count - 1) * PAGE_SIZE)
    own_pages = table + place * table_stride
    for first in range(0, count, BLOCK_W):
        w_W = first + tl.arange(0, BLOCK_W)
        pages_W = tl.load(own_pages + w_W, mask=w_W < count, other=0)
        tl.store(pages + start + w_W, pages_W, mask=w_W < count)
