"""Decode: one query per row over its paged keys, by programs that each work on an equal share of all rows' keys.

Legend: B decode rows, some of them · M query heads of one KV head, padded · N keys of a tile · H value size, padded
        R numbers of a key beyond its value, padded · S parts of one row · G query heads that are merged at once, padded
Owns: the assignment of tiles to programs, one pass over keys and values, and merging the parts of a row.
Does not know: prompts, the sizes of tiles, which rows share keys (``prefix.py``).

Row b's visible keys lie in tiles of BLOCK_N positions.  The tiles of all rows form one line, and each of a fixed number
of programs works on the same number of adjacent tiles: however ragged the lengths, all end together.  The host reads no
lengths to launch them, so a captured launch stays correct when it is replayed with other lengths.
"""

import triton
import triton.language as tl

from engine.kernels.dependent_launch import let_next_begin, wait_for_previous
from engine.kernels.products import join_sink, multiply, squashed


@triton.jit
def visible_tiles(length, skip, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first tile, number of tiles) visible from a row's last position; no tiles for length 0.  Scalars or
    vectors.  skip: tiles in front that are not a row's own (``prefix.py``)."""
    first_tile = length * 0 + skip
    if WINDOW > 0:
        first_tile = tl.maximum(length - WINDOW, 0) // BLOCK_N
    return first_tile, tl.cdiv(length, BLOCK_N) - first_tile


@triton.jit
def skips_of(skips, row, mask, SHARED: tl.constexpr):
    """Return the shared tiles of rows; 0 if no rows share any in this launch."""
    skip = row * 0
    if SHARED:
        skip = tl.load(skips + row, mask=mask, other=0)
    return skip


@triton.jit
def count_tiles(
    lengths, skips, num_rows, WINDOW: tl.constexpr, SHARED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the number of tiles of the first num_rows rows."""
    count_B = tl.zeros([BLOCK_B], tl.int32)
    for first_row in range(0, num_rows, BLOCK_B):
        row_B = first_row + tl.arange(0, BLOCK_B)
        length_B = tl.load(lengths + row_B, mask=row_B < num_rows, other=0)
        skip_B = skips_of(skips, row_B, row_B < num_rows, SHARED)
        _, tiles_B = visible_tiles(length_B, skip_B, WINDOW, BLOCK_N)
        count_B += tiles_B
    return tl.sum(count_B, 0)


@triton.jit
def find_row(
    lengths, skips, num_rows, tile,
    WINDOW: tl.constexpr, SHARED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (row of a tile of the line, number of that row's first tile).  Rows without tiles are skipped."""
    row = tile * 0
    row_begin = tile * 0
    passed = tile * 0
    for first_row in range(0, num_rows, BLOCK_B):
        row_B = first_row + tl.arange(0, BLOCK_B)
        length_B = tl.load(lengths + row_B, mask=row_B < num_rows, other=0)
        skip_B = skips_of(skips, row_B, row_B < num_rows, SHARED)
        _, tiles_B = visible_tiles(length_B, skip_B, WINDOW, BLOCK_N)
        before_B = (row_B < num_rows) & (passed + tl.cumsum(tiles_B, 0) <= tile)
        row += tl.sum(before_B.to(tl.int32), 0)
        row_begin += tl.sum(tl.where(before_B, tiles_B, 0), 0)
        passed += tl.sum(tiles_B, 0)
    return row, row_begin


@triton.jit
def share_size(num_tiles, num_shares):
    """Return the number of tiles in one share; the last shares may have fewer, or none."""
    return tl.maximum(tl.cdiv(num_tiles, num_shares), 1)


@triton.jit
def add_parts(
    out_GH, highest_G, weight_G, part_out, part_weight, place_S, there_S,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Return a sum of parts, its highest score and its weight, with some parts more.  place_S: of their first heads."""
    g_G = tl.arange(0, BLOCK_G)
    h_H = tl.arange(0, BLOCK_H)
    place_SG = place_S[:, None] + g_G[None, :]
    there_SG = there_S[:, None] & (g_G < HEADS)[None, :]
    # Past the nearest cache, which may hold what another program has overwritten.
    log_weight_SG = tl.load(part_weight + place_SG, mask=there_SG, other=-float("inf"), cache_modifier=".cg")
    part_SGH = tl.load(
        part_out + place_SG[:, :, None] * HEAD_SIZE + h_H[None, None, :],
        mask=there_SG[:, :, None] & (h_H < HEAD_SIZE)[None, None, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    new_highest_G = tl.maximum(highest_G, tl.max(log_weight_SG, 0))
    weight_SG = tl.exp2(log_weight_SG - new_highest_G[None, :])
    shrink_G = tl.exp2(highest_G - new_highest_G)
    out_GH = out_GH * shrink_G[:, None] + tl.sum(part_SGH * weight_SG[:, :, None], 0)
    return out_GH, new_highest_G, weight_G * shrink_G + tl.sum(weight_SG, 0)


@triton.jit
def merge_heads(
    out, part_out, part_weight, sinks, shared_out, shared_weight, num_rows, row, head, first_share, last_share,
    row_tiles, skip,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write HEADS query heads of a row from ``head`` on, out of the row's parts; 0 for a row without any."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(HEADS)
    s_S = tl.arange(0, BLOCK_S)
    g_G = tl.arange(0, BLOCK_G)
    h_H = tl.arange(0, BLOCK_H)
    out_GH = tl.zeros([BLOCK_G, BLOCK_H], tl.float32)
    # Not -inf: it is subtracted from itself while a block of parts has none.
    highest_G = tl.full([BLOCK_G], -1e30, tl.float32)
    weight_G = tl.zeros([BLOCK_G], tl.float32)
    # All loops count from 0, for the reason that ``decode_attention`` gives.
    if SHARED:  # noqa: SIM102 - the compiler decides this one
        if skip > 0:
            for done in range(0, SPLITS + 1, BLOCK_S):
                split_S = done + s_S
                # All splits but those behind the last tile, and the row's own part if it was within one share.
                there_S = (split_S < SPLITS) & (split_S * tl.cdiv(skip, SPLITS) < skip)
                there_S = there_S | ((split_S == SPLITS) & (last_share == first_share))
                place_S = (split_S.to(tl.int64) * num_rows + row) * NUM_HEADS + head
                out_GH, highest_G, weight_G = add_parts(
                    out_GH, highest_G, weight_G, shared_out, shared_weight, place_S, there_S,
                    HEADS, HEAD_SIZE, BLOCK_G, BLOCK_H,
                )  # fmt: skip
    if (row_tiles > 0) & ((last_share > first_share) | (skip == 0)):
        for done in range(0, last_share - first_share + 1, BLOCK_S):
            share_S = first_share + done + s_S
            # A row begins in place 1 of its first share, and continues in place 0 of the others.
            place_S = (share_S * 2 + (share_S == first_share).to(tl.int32)) * NUM_HEADS + head
            out_GH, highest_G, weight_G = add_parts(
                out_GH, highest_G, weight_G, part_out, part_weight, place_S, share_S <= last_share,
                HEADS, HEAD_SIZE, BLOCK_G, BLOCK_H,
            )  # fmt: skip
    if (row_tiles > 0) | (skip > 0):
        if SINKS:
            sink_G = tl.load(sinks + head + g_G, mask=g_G < HEADS, other=0.0).to(tl.float32) * 1.4426950408889634
            shrink_G, weight_G = join_sink(highest_G, weight_G, sink_G)
            out_GH = out_GH * shrink_G[:, None]
        out_GH = out_GH / tl.where(weight_G > 0, weight_G, 1.0)[:, None]
    place_GH = (row.to(tl.int64) * NUM_HEADS + head + g_G[:, None]) * HEAD_SIZE + h_H[None, :]
    tl.store(out + place_GH, out_GH.to(out.dtype.element_ty), mask=(g_G < HEADS)[:, None] & (h_H < HEAD_SIZE)[None, :])


# Values that vary between steps must not make another variant: compiling one takes a second, while clients wait.
@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["page_table", "lengths"])
def decode_attention(
    q, out, keys, values, page_table, lengths, part_out, part_weight, arrived, num_rows, scale_log2, q_stride,
    table_stride, squash, sinks, skips, shared_out, shared_weight,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, TAIL: tl.constexpr, SLOT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, SHARED: tl.constexpr, SPLITS: tl.constexpr, MERGES: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute program (head, share): all query heads of one KV head, so that a key is read once for all of them.

    q, out: row b at b * q_stride and b * heads * HEAD_SIZE. SLOT: numbers of a slot. TAIL: 0, or the numbers of a
    latent after its value; all heads then share one, and a program works on GROUP of them. CAPPED: scores go through
    ``squashed``, and scale_log2 is the cap's. sinks: a score of each head, if SINKS. part_out, part_weight: float32
    [share, 2, heads, HEAD_SIZE] and [share, 2, heads]; place 0 is for the continuation of a row of an earlier share,
    place 1 for the beginning of a row that a later share ends. part_weight is log2 of the sum of weights. A row within
    one share is written to out directly. keys, values: of q's type, or float8, converted to it here.
    skips: if SHARED, each row's tiles in front that ``shared_attention`` reads; such a row within one share is written
    to the last place of that kernel's parts.

    MERGES: the program that writes the last part of a row merges its parts, BLOCK_S at once, and rows of length 0 are
    written here; else ``merge_parts`` does both. arrived: int32 [share, NUM_GROUPS], of a row's first share: the parts
    that are written, 0 between launches. Whichever program is the last, it adds the parts in the order of shares.
    """
    head = tl.program_id(0)  # fastest: neighbours read neighbouring 256-byte pieces of the same slots
    share = tl.program_id(1)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    m_M = tl.arange(0, BLOCK_M)
    n_N = tl.arange(0, BLOCK_N)
    h_H = tl.arange(0, BLOCK_H)
    live_MH = (m_M < GROUP)[:, None] & (h_H < HEAD_SIZE)[None, :]
    live_1H = (h_H < HEAD_SIZE)[None, :]
    place_M = head * GROUP + m_M
    place_MH = place_M[:, None] * HEAD_SIZE + h_H[None, :]
    if MERGES:
        for step in range(0, tl.cdiv(num_rows - share, tl.num_programs(1))):
            empty = share + step * tl.num_programs(1)
            if tl.load(lengths + empty) == 0:
                empty_out = out + empty.to(tl.int64) * (NUM_GROUPS * GROUP * HEAD_SIZE)
                tl.store(empty_out + place_MH, tl.zeros([BLOCK_M, BLOCK_H], out.dtype.element_ty), mask=live_MH)
    num_tiles = count_tiles(lengths, skips, num_rows, WINDOW, SHARED, BLOCK_B, BLOCK_N)
    size = share_size(num_tiles, tl.num_programs(1))
    tile = share * size
    stop = tl.minimum(tile + size, num_tiles)
    if tile >= stop:
        return
    row, row_begin = find_row(lengths, skips, num_rows, tile, WINDOW, SHARED, BLOCK_B, BLOCK_N)

    query_MH = place_M[:, None] * (HEAD_SIZE + TAIL) + h_H[None, :]
    place_1H = h_H[None, :]
    if TAIL == 0:
        place_1H = (head * HEAD_SIZE + h_H)[None, :]
    r_R = tl.arange(0, BLOCK_R)
    live_1R = (r_R < TAIL)[None, :]
    if SINKS:
        sink_M = tl.load(sinks + place_M, mask=m_M < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634

    while tile < stop:
        length = tl.load(lengths + row)
        skip = skips_of(skips, row, row >= 0, SHARED)
        first_tile, row_tiles = visible_tiles(length, skip, WINDOW, BLOCK_N)
        row_stop = row_begin + row_tiles
        last = tl.minimum(stop, row_stop)
        first_index = first_tile + tile - row_begin
        pages = page_table + row.to(tl.int64) * table_stride
        q_MH = tl.load(q + row.to(tl.int64) * q_stride + query_MH, mask=live_MH, other=0.0)
        if TAIL > 0:
            tail_MR = q + row.to(tl.int64) * q_stride + (place_M * (HEAD_SIZE + TAIL) + HEAD_SIZE)[:, None]
            q_MR = tl.load(tail_MR + r_R[None, :], mask=(m_M < GROUP)[:, None] & live_1R, other=0.0)
        out_MH = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        highest_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
        weight_M = tl.zeros([BLOCK_M], tl.float32)
        # Pages are looked up one tile ahead and carried over: if a load's address comes from a load in the same
        # iteration, the compiler spends the pipeline's stages on the first and keeps only one tile of keys in flight.
        next_N = first_index * BLOCK_N + n_N
        page_N = tl.load(pages + next_N // PAGE_SIZE, mask=next_N < length, other=0)
        # From 0: about a counter that starts at a loaded number the compiler assumes nothing, not even that adjacent
        # addresses are adjacent, and then it neither loads keys in one go nor ahead of their use.
        for step in range(0, last - tile):
            position_N = (first_index + step) * BLOCK_N + n_N
            seen_N = position_N < length
            if WINDOW > 0:
                seen_N = seen_N & (position_N >= length - WINDOW)
            slot_N = page_N.to(tl.int64) * PAGE_STRIDE + position_N % PAGE_SIZE
            next_N = position_N + BLOCK_N
            page_N = tl.load(pages + next_N // PAGE_SIZE, mask=next_N < length, other=0)
            place_NH = slot_N[:, None] * SLOT + place_1H
            # Stale slots may hold NaN, and 0 * NaN is NaN, so they are not read at all.
            k_NH = tl.load(keys + place_NH, mask=seen_N[:, None] & live_1H, other=0.0).to(q.dtype.element_ty)
            score_MN = multiply(q_MH, tl.trans(k_NH), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INTERPRETED)
            if TAIL > 0:
                tail_NR = keys + slot_N[:, None] * SLOT + HEAD_SIZE + r_R[None, :]
                k_NR = tl.load(tail_NR, mask=seen_N[:, None] & live_1R, other=0.0).to(q.dtype.element_ty)
                score_MN = multiply(q_MR, tl.trans(k_NR), score_MN, INTERPRETED)
            if CAPPED:
                score_MN = squashed(score_MN, squash)
            score_MN = tl.where(seen_N[None, :], score_MN, -float("inf"))
            # Every tile of a share has a visible key, so this is finite from the first one on.
            new_highest_M = tl.maximum(highest_M, tl.max(score_MN, 1) * scale_log2)
            weight_MN = tl.exp2(score_MN * scale_log2 - new_highest_M[:, None])
            shrink_M = tl.exp2(highest_M - new_highest_M)
            weight_M = weight_M * shrink_M + tl.sum(weight_MN, 1)
            v_NH = k_NH
            if TAIL == 0:
                v_NH = tl.load(values + place_NH, mask=seen_N[:, None] & live_1H, other=0.0).to(q.dtype.element_ty)
            out_MH = multiply(weight_MN.to(v_NH.dtype), v_NH, out_MH * shrink_M[:, None], INTERPRETED)
            highest_M = new_highest_M
        whole = (tile == row_begin) & (last == row_stop)
        if SINKS:  # added once: here, or when the parts of a row are merged
            alone = whole & (skip == 0)
            shrink_M, sum_M = join_sink(highest_M, weight_M, tl.where(alone, sink_M, -float("inf")))
            out_MH = out_MH * shrink_M[:, None]
            weight_M = sum_M
            highest_M = tl.where(alone, tl.maximum(highest_M, sink_M), highest_M)
        out_MH = out_MH / tl.where(weight_M > 0, weight_M, 1.0)[:, None]
        if SHARED:  # noqa: SIM102 - the compiler decides this one
            if whole & (skip > 0):
                own = (SPLITS * num_rows + row).to(tl.int64) * (NUM_GROUPS * GROUP)
                tl.store(shared_out + own * HEAD_SIZE + place_MH, out_MH, mask=live_MH)
                tl.store(shared_weight + own + place_M, highest_M + tl.log2(weight_M), mask=m_M < GROUP)
        is_last = whole & (skip > 0)  # of its row's parts
        if whole:  # of a row that shares, what is merged with it comes later
            row_out = out + row.to(tl.int64) * (NUM_GROUPS * GROUP * HEAD_SIZE)
            tl.store(row_out + place_MH, out_MH.to(out.dtype.element_ty), mask=live_MH & (skip == 0))
        else:
            part = share * 2 + (tile == row_begin).to(tl.int32)
            tl.store(part_out + part * (NUM_GROUPS * GROUP * HEAD_SIZE) + place_MH, out_MH, mask=live_MH)
            log_weight_M = highest_M + tl.log2(weight_M)
            tl.store(part_weight + part * (NUM_GROUPS * GROUP) + place_M, log_weight_M, mask=m_M < GROUP)
        if MERGES:
            first_share = row_begin // size
            last_share = (row_stop - 1) // size
            tl.debug_barrier()  # every thread has stored before one of them counts
            if last_share > first_share:
                counter = arrived + first_share * NUM_GROUPS + head
                is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_share - first_share
                if is_last:
                    tl.store(counter, 0)
            if is_last:
                merge_heads(
                    out, part_out, part_weight, sinks, shared_out, shared_weight, num_rows, row, head * GROUP,
                    first_share, last_share, row_tiles, skip,
                    NUM_GROUPS * GROUP, GROUP, HEAD_SIZE, SINKS, SHARED, SPLITS, BLOCK_S, BLOCK_H,
                )  # fmt: skip
        tile = last
        row_begin = row_stop
        row += 1


@triton.jit(do_not_specialize=["num_rows", "num_shares", "heads"], do_not_specialize_on_alignment=["lengths"])
def merge_parts(
    out, lengths, part_out, part_weight, num_rows, num_shares, heads, sinks, skips, shared_out, shared_weight,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
    SHARED: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge parts, as program (i, row): query heads i * heads ... of one row.  num_shares: the decode launch's.

    Most programs of a large batch find that their row was within one share, and end.
    """
    row = tl.program_id(1)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    size = share_size(count_tiles(lengths, skips, num_rows, WINDOW, SHARED, BLOCK_B, BLOCK_N), num_shares)
    row_begin = count_tiles(lengths, skips, row, WINDOW, SHARED, BLOCK_B, BLOCK_N)
    skip = skips_of(skips, row, row >= 0, SHARED)
    _, row_tiles = visible_tiles(tl.load(lengths + row), skip, WINDOW, BLOCK_N)
    first_share = row_begin // size
    last_share = (row_begin + tl.maximum(row_tiles, 1) - 1) // size
    if (row_tiles == 0) | (last_share > first_share) | (skip > 0):
        for number in range(0, heads):
            merge_heads(
                out, part_out, part_weight, sinks, shared_out, shared_weight, num_rows, row,
                tl.program_id(0) * heads + number, first_share, last_share, row_tiles, skip,
                NUM_HEADS, 1, HEAD_SIZE, SINKS, SHARED, SPLITS, BLOCK_S, BLOCK_H,
            )  # fmt: skip
