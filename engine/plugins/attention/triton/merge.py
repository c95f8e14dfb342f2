"""Puts together the rows that more than one share of a decode batch has worked on, and zeroes the empty ones.

Legend: B decode rows, some of them · S parts of one row · H head size, padded
Owns: the weighting of parts.  Does not know: keys and values; who made which part is computed as ``decode.py`` does.
"""

import triton
import triton.language as tl

from engine.plugins.attention.triton.shares import count_tiles, share_size, visible_tiles


@triton.jit(do_not_specialize=["num_rows", "num_shares", "heads"], do_not_specialize_on_alignment=["lengths"])
def merge_parts(
    out,
    lengths,
    part_out,
    part_weight,
    num_rows,
    num_shares,
    heads,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (i, row): query heads i * heads ... of one row.  num_shares: the decode launch's.

    Most programs of a large batch find that their row was within one share, and end.
    """
    row = tl.program_id(1)
    size = share_size(count_tiles(lengths, num_rows, WINDOW, BLOCK_B, BLOCK_N), num_shares)
    row_begin = count_tiles(lengths, row, WINDOW, BLOCK_B, BLOCK_N)
    _, row_tiles = visible_tiles(tl.load(lengths + row), WINDOW, BLOCK_N)
    first_share = row_begin // size
    last_share = (row_begin + tl.maximum(row_tiles, 1) - 1) // size
    s_S = tl.arange(0, BLOCK_S)
    h_H = tl.arange(0, BLOCK_H)
    if (row_tiles == 0) | (last_share > first_share):
        # Both loops count from 0, for the reason that ``decode.py`` gives.
        for number in range(0, heads):
            head = tl.program_id(0) * heads + number
            out_H = tl.zeros([BLOCK_H], tl.float32)
            # Not -inf: it is subtracted from itself while a block of parts has none.
            highest = -1e30
            weight = 0.0
            if row_tiles > 0:
                for done in range(0, last_share - first_share + 1, BLOCK_S):
                    share_S = first_share + done + s_S
                    # A row begins in place 1 of its first share, and goes on in place 0 of the others.
                    part_S = (share_S * 2 + (share_S == first_share).to(tl.int32)) * NUM_HEADS + head
                    mine_S = share_S <= last_share
                    log_weight_S = tl.load(part_weight + part_S, mask=mine_S, other=-float("inf"))
                    part_SH = tl.load(
                        part_out + part_S[:, None] * HEAD_SIZE + h_H[None, :],
                        mask=mine_S[:, None] & (h_H < HEAD_SIZE)[None, :],
                        other=0.0,
                    )
                    new_highest = tl.maximum(highest, tl.max(log_weight_S, 0))
                    weight_S = tl.exp2(log_weight_S - new_highest)
                    shrink = tl.exp2(highest - new_highest)
                    out_H = out_H * shrink + tl.sum(part_SH * weight_S[:, None], 0)
                    weight = weight * shrink + tl.sum(weight_S, 0)
                    highest = new_highest
                out_H = out_H / weight
            place_H = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE + h_H
            tl.store(out + place_H, out_H.to(out.dtype.element_ty), mask=h_H < HEAD_SIZE)
