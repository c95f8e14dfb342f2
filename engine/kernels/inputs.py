"""The inputs of a decode step, made on the device from the rows kept there, without reading from the host.

Legend: R rows · M longest sequence and one · P page-table width · B decode rows of the batch, padding included
        W pages of the batch's table
Owns: the reads before a decode step and the write after it.  Does not know: scheduling, sampling, graphs.

Positions come from the lengths on the device, which the same launch advances.  So a captured step can be replayed step
after step, and between two replays the host changes at most the list of running rows.  A row whose tokens are verified
has several places in the batch, side by side, and the host gives their positions, or their distances from a length that
another launch advances once it is known how many tokens were right.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, wait_for_previous
from engine.layers.step import BEHIND, DecodeInputs

PAGES_AT_ONCE = 256
PLACES_AT_ONCE = 256


def fill_inputs(
    rows_B: Tensor,
    given_B: Tensor,
    tokens_RM: Tensor,
    pages_RP: Tensor,
    lengths_R: Tensor,
    page_size: int,
    dump_page: int,
    inputs: DecodeInputs,
    page_stride: int = 0,
) -> None:
    """Write ``inputs`` for one more token of each row in rows_B; the last one's position and 1 are a row's new length.

    rows_B: int64; a negative one is padding: one token of id 0 at position 0 of the dump page.
    given_B: int64, the token's position; negative for the length of a row that has one place alone, whose length grows.
    From ``BEHIND`` on: a distance from the row's length, which stays.  The places of a row are adjacent, in the order
    of their positions.
    tokens_RM, pages_RP, lengths_R: int32, contiguous.  lengths_R: number of positions of each row that have K/V.
    page_stride: of the pool; 0 for page_size.
    """
    page_table_BW = inputs.page_table_BW
    if len(rows_B):
        fill_row[(len(rows_B),)](
            rows_B, given_B, len(rows_B), tokens_RM, pages_RP, lengths_R, inputs.token_ids_B, inputs.positions_B,
            inputs.slots_B, inputs.write_at_B, inputs.lengths_B, page_table_BW, tokens_RM.shape[1], pages_RP.shape[1],
            page_table_BW.shape[1], page_table_BW.stride(0), dump_page,
            PAGE_SIZE=page_size, PAGE_STRIDE=page_stride or page_size, BEHIND=BEHIND, BLOCK_W=PAGES_AT_ONCE,
            num_warps=2, enable_fp_fusion=True, **launch_options(rows_B.device),
        )  # fmt: skip


def write_tokens(write_at_N: Tensor, token_ids_N: Tensor, tokens_RM: Tensor) -> None:
    """Write each token id, or 0 if it is negative, to tokens_RM.view(-1)[write_at], unless that is negative.

    write_at_N, token_ids_N: int64."""
    if len(write_at_N):
        write_places[(triton.cdiv(len(write_at_N), PLACES_AT_ONCE),)](
            write_at_N, token_ids_N, tokens_RM, len(write_at_N),
            BLOCK_N=PLACES_AT_ONCE,
            num_warps=2, enable_fp_fusion=True, **launch_options(tokens_RM.device),
        )  # fmt: skip


# The width of the table and the row list change from step to step; neither may make another variant.
@triton.jit(
    do_not_specialize=["num_rows", "row_len", "row_pages", "num_pages", "table_stride", "dump_page"],
    do_not_specialize_on_alignment=[
        "rows", "given", "token_ids", "positions", "slots", "write_at", "batch_lengths", "page_table",
    ],
)  # fmt: skip
def fill_row(
    rows, given, num_rows, tokens, pages, lengths, token_ids, positions, slots, write_at, batch_lengths, page_table,
    row_len, row_pages, num_pages, table_stride, dump_page,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BEHIND: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one row of the batch per program."""
    place = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    row = tl.load(rows + place)
    real = row >= 0
    stated = tl.load(given + place)
    # A row with several places has them all stated, or all behind its length: none reads what its last one writes.
    position = tl.load(lengths + row, mask=real & (stated < 0), other=0)
    position += tl.where(real & (stated < -1), stated - BEHIND, 0).to(tl.int32)
    position = tl.where(real & (stated >= 0), stated.to(tl.int32), position)
    last = tl.load(rows + place + 1, mask=place + 1 < num_rows, other=-1) != row
    own_pages = pages + row * row_pages
    token = tl.load(tokens + row * row_len + position, mask=real, other=0)
    page = tl.load(own_pages + position // PAGE_SIZE, mask=real, other=0)
    page = tl.where(real, page, dump_page)
    tl.store(token_ids + place, token.to(tl.int64))
    tl.store(positions + place, position.to(tl.int64))
    tl.store(slots + place, page.to(tl.int64) * PAGE_STRIDE + position % PAGE_SIZE)
    tl.store(write_at + place, tl.where(real, row * row_len + position + 1, -1))
    tl.store(batch_lengths + place, position + 1)
    # Every thread has read the old length before one of them writes the new one.
    tl.debug_barrier()
    tl.store(lengths + row, position + 1, mask=real & last & (stated >= -1))
    own_width = tl.where(real, position // PAGE_SIZE + 1, 0)
    for first in range(0, num_pages, BLOCK_W):
        w_W = first + tl.arange(0, BLOCK_W)
        pages_W = tl.load(own_pages + w_W, mask=w_W < own_width, other=0)
        pages_W = tl.where(real, pages_W, dump_page)
        tl.store(page_table + place * table_stride + w_W, pages_W, mask=w_W < num_pages)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["write_at", "token_ids"])
def write_places(write_at, token_ids, tokens, num_tokens, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Write some tokens per program."""
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_previous(PDL)
    at_N = tl.load(write_at + n_N, mask=n_N < num_tokens, other=-1)
    token_N = tl.load(token_ids + n_N, mask=n_N < num_tokens, other=0)
    tl.store(tokens + at_N, tl.maximum(token_N, 0).to(tl.int32), mask=at_N >= 0)
