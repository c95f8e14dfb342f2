"""Decode rows that share a prefix: its keys and values are read once for many rows, not once for each.

Legend: B decode rows · P pages at once · C candidates at once · M rows times query heads of one KV head
        N keys of a tile · H head size
Owns: which rows share which pages, and attention over those pages.  Does not know: the rows' own keys, merging.

Rows with the same pages in front have the same keys there, since a page's number stands for its content.  Rows whose
first page is the same belong together; the set that saves the most reading is chosen, once a step, on the device, so
that a captured launch stays correct when it is replayed with other page tables.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import let_next_begin, wait_for_previous
from engine.plugins.attention.triton.prefill import attend_tile

LEAST_ROWS: Final = 16  # of a batch: with fewer, launches take longer than reading keys again
SPLITS: Final = 4  # of the shared keys, so that a long prefix has enough programs
ROWS_AT_ONCE: Final = 256
CANDIDATES_AT_ONCE: Final = 16
PAGES_AT_ONCE: Final = 128


class SharedKeys:
    """What the decode rows of a batch share, found on the device, and the parts of their results.

    skips_B: tiles of each row that are shared."""

    def __init__(self, max_rows: int, heads: int, head_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.skips_B, self._leaders_B, self._commons_B, self._members_B = torch.zeros(
            (4, max_rows), dtype=torch.int32, device=device
        )
        self._chosen = torch.zeros(2, dtype=torch.int32, device=device)
        places = (SPLITS + 1) * max_rows * heads
        self.out = torch.empty(places * head_size, dtype=torch.float32, device=device)
        self.weight = torch.empty(places, dtype=torch.float32, device=device)

    def find(
        self,
        page_table_BP: Tensor,
        lengths_B: Tensor,
        num_rows: int,
        page_size: int,
        block_keys: int,
        launch: Mapping[str, bool],
    ) -> None:
        """Find the rows of a step that share the most tiles."""
        compare_rows[(num_rows,)](
            page_table_BP, lengths_B, self._leaders_B, self._commons_B, num_rows, page_table_BP.stride(0),
            PAGE_SIZE=page_size, BLOCK_B=ROWS_AT_ONCE, BLOCK_P=PAGES_AT_ONCE, num_warps=4, **launch,
        )  # fmt: skip
        choose_rows[(1,)](
            self._leaders_B, self._commons_B, self._chosen, self._members_B, self.skips_B, num_rows,
            PAGE_SIZE=page_size, BLOCK_N=block_keys, BLOCK_B=max(ROWS_AT_ONCE, triton.next_power_of_2(num_rows)),
            BLOCK_C=CANDIDATES_AT_ONCE, num_warps=8, **launch,
        )  # fmt: skip

    def attend(
        self, q_TNH: Tensor, keys: Tensor, values: Tensor, page_table_BP: Tensor, num_rows: int, scale_log2: float,
        squash: float, num_groups: int, constants: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Attend to the shared keys."""
        blocks = triton.cdiv(num_rows, constants["BLOCK_M"] // constants["GROUP"])
        shared_attention[(num_groups, blocks, SPLITS)](
            q_TNH, keys, values, page_table_BP, self._chosen, self._members_B, self.out, self.weight, num_rows,
            scale_log2, q_TNH.stride(0), page_table_BP.stride(0), squash, SPLITS=SPLITS, **constants,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["page_table", "lengths"])
def compare_rows(
    page_table, lengths, leaders, commons, num_rows, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the first row with a row's first page, and the number of whole pages that are alike, one row per program.

    A row of less than a page has none, and is its own."""
    row = tl.program_id(0)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    stride = table_stride.to(tl.int64)
    whole = (tl.load(lengths + row) - 1) // PAGE_SIZE  # without the page that this step writes
    page = tl.load(page_table + row * stride)
    leader = row
    for first in range(0, row, BLOCK_B):
        row_B = first + tl.arange(0, BLOCK_B)
        mine_B = row_B < row
        long_B = tl.load(lengths + row_B, mask=mine_B, other=0) > PAGE_SIZE
        page_B = tl.load(page_table + row_B * stride, mask=mine_B, other=-1)
        leader = tl.minimum(leader, tl.min(tl.where(long_B & (page_B == page), row_B, row), 0))
    common = tl.maximum(tl.minimum(whole, (tl.load(lengths + leader) - 1) // PAGE_SIZE), 0)
    limit = common
    for first in range(0, limit, BLOCK_P):
        p_P = first + tl.arange(0, BLOCK_P)
        mine_P = tl.load(page_table + row * stride + p_P, mask=p_P < limit, other=0)
        theirs_P = tl.load(page_table + leader * stride + p_P, mask=p_P < limit, other=0)
        common = tl.minimum(common, tl.min(tl.where(mine_P == theirs_P, limit, p_P), 0))
    tl.store(leaders + row, leader)
    tl.store(commons + row, common)


@triton.jit(do_not_specialize=["num_rows"])
def choose_rows(
    leaders, commons, chosen, members, skips, num_rows,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the rows that share the most, in one program.

    chosen: gets the number of rows and that of shared tiles; both 0 if none are shared.  members: the rows.
    skips: each row's tiles that are shared."""
    wait_for_previous(PDL)
    let_next_begin(PDL)
    b_B = tl.arange(0, BLOCK_B)
    leader_B = tl.load(leaders + b_B, mask=b_B < num_rows, other=-1)
    tiles_B = tl.load(commons + b_B, mask=b_B < num_rows, other=0) * PAGE_SIZE // BLOCK_N
    leader_B = tl.where(tiles_B > 0, leader_B, -1)
    best = 0
    best_leader = -2
    best_tiles = 0
    for first in range(0, num_rows, BLOCK_C):
        c_C = first + tl.arange(0, BLOCK_C)
        alike_CB = leader_B[None, :] == c_C[:, None]
        tiles_C = tl.min(tl.where(alike_CB, tiles_B[None, :], 1 << 30), 1)
        saved_C = tl.where(tiles_C < 1 << 30, (tl.sum(alike_CB.to(tl.int32), 1) - 1) * tiles_C, 0)
        saved = tl.max(saved_C, 0)
        leader = tl.min(tl.where(saved_C == saved, c_C, 1 << 30), 0)
        tiles = tl.sum(tl.where(c_C == leader, tiles_C, 0), 0)
        better = saved > best
        best_leader = tl.where(better, leader, best_leader)
        best_tiles = tl.where(better, tiles, best_tiles)
        best = tl.maximum(best, saved)
    mine_B = leader_B == best_leader
    tl.store(members + tl.cumsum(mine_B.to(tl.int32), 0) - 1, b_B, mask=mine_B)
    tl.store(skips + b_B, tl.where(mine_B, best_tiles, 0), mask=b_B < num_rows)
    tl.store(chosen, tl.sum(mine_B.to(tl.int32), 0))
    tl.store(chosen + 1, best_tiles)


@triton.jit
def split_size(num_tiles, SPLITS: tl.constexpr):
    """Return the number of tiles in one split of the shared keys; the last splits may have fewer, or none."""
    return tl.cdiv(num_tiles, SPLITS)


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["page_table"])
def shared_attention(
    q, keys, values, page_table, chosen, members, part_out, part_weight, num_rows, scale_log2, q_stride, table_stride,
    squash,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, SLOT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute program (head, block of rows, split): some rows' queries of one KV head over some of the shared tiles.

    part_out, part_weight: float32 [SPLITS + 1, num_rows, heads, HEAD_SIZE] and [SPLITS + 1, num_rows, heads], as for
    ``decode_attention``; the last place is for a row's own keys."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    count = tl.load(chosen)
    num_tiles = tl.load(chosen + 1)
    size = split_size(num_tiles, SPLITS)
    first = split * size
    num_mine = tl.minimum(size, num_tiles - first)
    if (block * QUERIES >= count) | (num_mine <= 0):
        return
    m_M = tl.arange(0, BLOCK_M)
    h_H = tl.arange(0, BLOCK_H)
    place_M = block * QUERIES + m_M // GROUP
    live_M = (m_M < QUERIES * GROUP) & (place_M < count)
    row_M = tl.load(members + place_M, mask=live_M, other=0).to(tl.int64)
    live_1H = (h_H < HEAD_SIZE)[None, :]
    head_M = head * GROUP + m_M % GROUP
    q_M = row_M * q_stride + head_M * HEAD_SIZE
    q_MH = tl.load(q + q_M[:, None] + h_H[None, :], mask=live_M[:, None] & live_1H, other=0.0)
    # Every member has these pages.
    pages = page_table + tl.load(members).to(tl.int64) * table_stride
    num_keys = (first + num_mine) * BLOCK_N
    key_N = first * BLOCK_N + tl.arange(0, BLOCK_N)
    page_N = tl.load(pages + key_N // PAGE_SIZE)
    out_MH = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    highest_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weight_M = tl.zeros([BLOCK_M], tl.float32)
    place_1H = (head * HEAD_SIZE + h_H)[None, :]
    for step in range(0, num_mine):
        out_MH, highest_M, weight_M, page_N = attend_tile(
            out_MH, highest_M, weight_M, page_N, q_MH, q_MH, m_M, keys, values, pages, first + step, num_keys,
            place_1H, live_1H, scale_log2, squash, HEAD_SIZE, 0, CAPPED, 16, SLOT, PAGE_SIZE, PAGE_STRIDE,
            0, BLOCK_M, BLOCK_N, INTERPRETED, MASKED=False,
        )  # fmt: skip
    part_M = (split * num_rows + row_M) * (NUM_GROUPS * GROUP) + head_M
    out_MH = out_MH / weight_M[:, None]
    tl.store(part_out + part_M[:, None] * HEAD_SIZE + h_H[None, :], out_MH, mask=live_M[:, None] & live_1H)
    tl.store(part_weight + part_M, highest_M + tl.log2(weight_M), mask=live_M)
