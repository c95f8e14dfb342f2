"""Prefill: the last positions of each sequence, causally, over all of its paged keys.

Legend: B sequences, some of them · M query rows of a tile · N keys of a tile · H value size, padded
        R numbers of a key beyond its value, padded
Owns: the assignment of queries to programs, the masks, one pass over keys and values.  Does not know: decode rows.

A tile's rows are adjacent queries times the query heads of one KV head, so that short chunks fill it too and
its queries end at nearly the same key.
"""

import triton
import triton.language as tl

from engine.kernels.dependent_launch import let_next_begin, wait_for_previous
from engine.kernels.products import join_sink, multiply, squashed


@triton.jit
def attend_tile(
    out_MH, highest_M, weight_M, page_N, q_MH, q_MR, position_M, keys, values, pages, index, num_keys, place_1H,
    live_1H, scale_log2, squash,
    HEAD_SIZE: tl.constexpr, TAIL: tl.constexpr, CAPPED: tl.constexpr, BLOCK_R: tl.constexpr,
    SLOT: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process one more tile of keys, and return (output, highest score, sum of weights, pages of the next tile).

    MASKED: some query does not see some key; otherwise every query sees every key.
    """
    key_N = index * BLOCK_N + tl.arange(0, BLOCK_N)
    slot_N = page_N.to(tl.int64) * PAGE_STRIDE + key_N % PAGE_SIZE
    # One tile ahead, for the reason that ``decode.py`` gives.
    next_N = key_N + BLOCK_N
    page_N = tl.load(pages + next_N // PAGE_SIZE, mask=next_N < num_keys, other=0)
    place_NH = slot_N[:, None] * SLOT + place_1H
    live_NH = live_1H
    if MASKED:
        # Stale slots may hold NaN, and 0 * NaN is NaN, so they are not read at all.
        live_NH = (key_N < num_keys)[:, None] & live_1H
    k_NH = tl.load(keys + place_NH, mask=live_NH, other=0.0).to(q_MH.dtype)
    score_MN = multiply(q_MH, tl.trans(k_NH), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INTERPRETED)
    if TAIL > 0:
        r_R = tl.arange(0, BLOCK_R)
        live_NR = (r_R < TAIL)[None, :]
        if MASKED:
            live_NR = (key_N < num_keys)[:, None] & live_NR
        k_NR = tl.load(keys + slot_N[:, None] * SLOT + HEAD_SIZE + r_R[None, :], mask=live_NR, other=0.0).to(q_MH.dtype)
        score_MN = multiply(q_MR, tl.trans(k_NR), score_MN, INTERPRETED)
    if CAPPED:
        score_MN = squashed(score_MN, squash)
    if MASKED:
        seen_MN = key_N[None, :] <= position_M[:, None]
        if WINDOW > 0:
            seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(seen_MN, score_MN, -float("inf"))
    new_highest_M = tl.maximum(highest_M, tl.max(score_MN, 1) * scale_log2)
    base_M = new_highest_M
    if MASKED:
        # For a query that has seen no key yet, -inf minus itself would be NaN.
        base_M = tl.where(new_highest_M == -float("inf"), 0.0, new_highest_M)
    weight_MN = tl.exp2(score_MN * scale_log2 - base_M[:, None])
    shrink_M = tl.exp2(highest_M - base_M)
    weight_M = weight_M * shrink_M + tl.sum(weight_MN, 1)
    v_NH = k_NH
    if TAIL == 0:
        v_NH = tl.load(values + place_NH, mask=live_NH, other=0.0).to(q_MH.dtype)
    out_MH = multiply(weight_MN.to(v_NH.dtype), v_NH, out_MH * shrink_M[:, None], INTERPRETED)
    return out_MH, new_highest_M, weight_M, page_N


# Values that vary between steps must not make another variant: compiling one takes a second, while clients wait.
@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "lengths", "query_starts"],
)
def prefill_attention(
    q, out, keys, values, page_table, lengths, query_starts, num_rows, scale_log2, q_stride, table_stride,
    squash, sinks,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, TAIL: tl.constexpr, SLOT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr, ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """Compute program (head, i): a tile of queries of one sequence, over the keys that any of them sees.

    q, out: query t at t * q_stride and t * heads * HEAD_SIZE. SLOT, TAIL, CAPPED, SINKS, keys, values: as for decode.
    query_starts: the start of each sequence's queries in q. Sequence b's tiles begin at number (its first query) //
    QUERIES + b, which leaves room for the part-filled last tile of every sequence before it; so T // QUERIES +
    num_rows programs suffice for any lengths. ONE_LOOP: all tiles of keys use the same instructions; two loops may be
    compiled differently, and the end of the first depends on a query's place in its tile.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # later queries see more keys: the longest work first
    wait_for_previous(PDL)
    let_next_begin(PDL)
    origin = tl.load(query_starts)
    begun_B = tl.zeros([BLOCK_B], tl.int32)
    for first_row in range(0, num_rows, BLOCK_B):
        row_B = first_row + tl.arange(0, BLOCK_B)
        start_B = tl.load(query_starts + row_B, mask=row_B < num_rows, other=0)
        begun_B += ((row_B < num_rows) & ((start_B - origin) // QUERIES + row_B <= tile)).to(tl.int32)
    row = tl.sum(begun_B, 0) - 1
    start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - start
    first_query = (tile - (start - origin) // QUERIES - row) * QUERIES
    if first_query >= num_queries:
        return

    length = tl.load(lengths + row)
    m_M = tl.arange(0, BLOCK_M)
    h_H = tl.arange(0, BLOCK_H)
    query_M = first_query + m_M // GROUP
    live_M = (m_M < QUERIES * GROUP) & (query_M < num_queries)
    live_1H = (h_H < HEAD_SIZE)[None, :]
    live_MH = live_M[:, None] & live_1H
    head_M = head * GROUP + m_M % GROUP
    q_M = (start + query_M).to(tl.int64) * q_stride + head_M * (HEAD_SIZE + TAIL)
    q_MH = tl.load(q + q_M[:, None] + h_H[None, :], mask=live_MH, other=0.0)
    q_MR = q_MH
    if TAIL > 0:
        r_R = tl.arange(0, BLOCK_R)
        live_MR = live_M[:, None] & (r_R < TAIL)[None, :]
        q_MR = tl.load(q + q_M[:, None] + HEAD_SIZE + r_R[None, :], mask=live_MR, other=0.0)
    position_M = length - num_queries + query_M
    place_1H = h_H[None, :]
    if TAIL == 0:
        place_1H = (head * HEAD_SIZE + h_H)[None, :]
    pages = page_table + row.to(tl.int64) * table_stride

    first_position = length - num_queries + first_query
    num_keys = tl.minimum(length, first_position + QUERIES)
    last_index = tl.cdiv(tl.maximum(num_keys, 0), BLOCK_N)
    index = first_position * 0
    if WINDOW > 0:
        index = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    masked_index = index
    if WINDOW == 0 and not ONE_LOOP:
        masked_index = tl.maximum(first_position + 1, 0) // BLOCK_N  # tiles before it end by the first query
    out_MH = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    highest_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weight_M = tl.zeros([BLOCK_M], tl.float32)
    key_N = index * BLOCK_N + tl.arange(0, BLOCK_N)
    page_N = tl.load(pages + key_N // PAGE_SIZE, mask=key_N < num_keys, other=0)
    # Both count from 0, for the reason that ``decode.py`` gives.
    if WINDOW == 0 and not ONE_LOOP:
        for step in range(0, masked_index):
            out_MH, highest_M, weight_M, page_N = attend_tile(
                out_MH, highest_M, weight_M, page_N, q_MH, q_MR, position_M, keys, values, pages, step, num_keys,
                place_1H, live_1H, scale_log2, squash, HEAD_SIZE, TAIL, CAPPED, BLOCK_R, SLOT, PAGE_SIZE, PAGE_STRIDE,
                WINDOW, BLOCK_M, BLOCK_N, INTERPRETED, MASKED=False,
            )  # fmt: skip
    for step in range(0, last_index - masked_index):
        out_MH, highest_M, weight_M, page_N = attend_tile(
            out_MH, highest_M, weight_M, page_N, q_MH, q_MR, position_M, keys, values, pages, masked_index + step,
            num_keys, place_1H, live_1H, scale_log2, squash, HEAD_SIZE, TAIL, CAPPED, BLOCK_R, SLOT, PAGE_SIZE,
            PAGE_STRIDE, WINDOW, BLOCK_M, BLOCK_N, INTERPRETED, MASKED=True,
        )  # fmt: skip
    if SINKS:
        sink_M = tl.load(sinks + head_M).to(tl.float32) * 1.4426950408889634
        shrink_M, weight_M = join_sink(highest_M, weight_M, sink_M)
        out_MH = out_MH * shrink_M[:, None]
    out_MH = out_MH / tl.where(weight_M > 0, weight_M, 1.0)[:, None]
    out_M = (start + query_M).to(tl.int64) * (NUM_GROUPS * GROUP * HEAD_SIZE) + head_M * HEAD_SIZE
    tl.store(out + out_M[:, None] + h_H[None, :], out_MH.to(out.dtype.element_ty), mask=live_MH)
