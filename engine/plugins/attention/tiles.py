"""Batch-invariant attention: a token's result has the same bits in every step.

Legend: T new tokens in the step (ragged, packed) · B query tiles of a run · R rows of a tile: its positions times the
        query heads of a group · K keys of a tile · S slots · N query heads · G KV heads · H head size
Owns: the tiles, the masks, the order of sums.  Does not know: models, the scheduler.

Positions and keys are cut into tiles from position 0 on, independent of where a chunk of the prompt begins.  A query
tile meets one key tile after the other, in a product of constant shape, and at the same row of it; the results are
added in the order of positions.  Missing rows and keys take part and are hidden.  So how a sequence was chunked, cached
or batched cannot change a result, as long as products of one shape are the same each time; ``torch`` guarantees that on
one machine, and the start checks it (``engine/startup/invariance.py``).

If pages keep float32 and there is a compiler, ``engine/kernels/attention.c`` is used instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.attention import compiled_attention
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32", "bfloat16", "float16"],
    "kv_layouts": ["layer_first", "page_first"],
    "supports": ["layer_windows"],
    "invariant": True,
}
KEYS = 64  # of a key tile
# Rows of a query tile are a multiple of this.  One row would cost a decode step as much as four; and each thread's
# scratch space then begins at a multiple of 32 bytes, without which products differ.
ROWS = 4
# Keys up to this size stay in a core's cache between their copy and their use.
CACHED_BYTES = 1 << 20
# Most bytes of the results of a run's key tiles before they are added: longer chunks of prompts become several runs.
RESULT_BYTES = 64 << 20
# In place of minus infinity: a row that sees nothing of a tile gets weight 0 for it, and no NaN.
HIDDEN = -1e30

Int32 = npt.NDArray[np.int32]
Spans = tuple[tuple[int, int], ...]
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Key tiles of one call: one for each of the query tiles of every span, or a single one for all of them.

    spans: (first, last) of a run's query tiles; those of a span meet the key tile after those they met before.
    slots: K of each key tile, the places of its keys.  mask_B1RK: hides keys after the query, before its window, and
    missing keys; B counts the query tiles of all spans.  copies_SGH: where keys and values are copied, in every layer,
    and copied_BGKH: views of these."""

    spans: tuple[tuple[int, int], ...]
    slots: Tensor
    mask_B1RK: Tensor
    copies_SGH: tuple[Tensor, Tensor]
    copied_BGKH: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TileRun:
    """Query tiles that are computed together.

    taken: indices of the T x N queries in the tiles, in the order of B, G, R; any index for a row without a query.
    kept: indices of the wanted results, in the order of B, R, G, with all N of a token adjacent.
    written_Y: their tokens in T; None if they are the whole step's, in order.
    """

    taken: Tensor
    kept: Tensor
    written_Y: Tensor | None
    key_tiles: tuple[KeyTiles, ...]


class TiledAttention:
    """An ``AttentionBackend`` on the CPU in tiles of constant shape."""

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        self.spec = spec
        self.pool = pool
        self._heads = spec.num_heads // spec.num_kv_heads
        self._positions = max(1, ROWS // self._heads)  # of a query tile
        self._used_rows = self._positions * self._heads
        self._rows = -(-self._used_rows // ROWS) * ROWS
        slots_SGH = pool.keys(0)
        tile_bytes = KEYS * spec.num_kv_heads * spec.head_size * slots_SGH.element_size()
        self._together = max(1, CACHED_BYTES // tile_bytes)  # decode rows of a run, key tiles of a call
        self._copies_2SGH = slots_SGH.new_empty((2, self._together * KEYS, *slots_SGH.shape[1:]))
        head_G1 = np.arange(spec.num_kv_heads)[:, None]
        place_R = np.minimum(np.arange(self._rows), self._used_rows - 1)
        self._place_R = place_R // self._heads  # place of a row's position in the tile
        self._head_GR = head_G1 * self._heads + place_R % self._heads  # index in N
        # Where the results of all N lie for a tile's first position; those of the next one are this much further.
        self._result_N = (np.arange(self._heads) * spec.num_kv_heads + head_G1).ravel()
        self._position_results = self._heads * spec.num_kv_heads
        self._whole: list[TileRun] = []
        self._windowed: list[TileRun] = []

    def plan_step(self, batch: AttentionBatch) -> None:
        """Compute every sequence's tiles, once for all layers."""
        table_BP = batch.page_table_BP.numpy()
        if not self.spec.window or self.spec.first_window_layer or self.spec.full_layers:
            self._whole = self._plan(batch, table_BP, 0)
        if self.spec.window:
            self._windowed = self._plan(batch, table_BP, self.spec.window)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        keys_SGH, values_SGH = self.pool.keys(layer), self.pool.values(layer)
        queries_H = q_TNH.flatten(0, 1)
        tiles = (-1, self.spec.num_kv_heads, self._rows, self.spec.head_size)
        out_TNH = None
        for run in self._windowed if self.spec.window_of(layer) else self._whole:
            q_BGRH = queries_H.index_select(0, run.taken).view(tiles)
            out_BRGH = self._attend_run(run, q_BGRH, keys_SGH, values_SGH).transpose(1, 2)
            out_YNH = out_BRGH.reshape(-1, q_TNH.shape[2]).index_select(0, run.kept).view(-1, *q_TNH.shape[1:])
            if run.written_Y is None:
                return out_YNH.to(q_TNH.dtype)
            out_TNH = torch.empty_like(q_TNH) if out_TNH is None else out_TNH
            out_TNH.index_copy_(0, run.written_Y, out_YNH.to(q_TNH.dtype))
        assert out_TNH is not None, "a step without tokens"
        return out_TNH

    def _attend_run(self, run: TileRun, q_BGRH: Tensor, keys_SGH: Tensor, values_SGH: Tensor) -> Tensor:
        """Return out_BGRH: each key tile's result, weighted by its share of the softmax, added in order."""
        results = []
        for tiles in run.key_tiles:
            # Always to one place and with the same strides, so that products have the same operands each time.
            torch.index_select(keys_SGH, 0, tiles.slots, out=tiles.copies_SGH[0])
            torch.index_select(values_SGH, 0, tiles.slots, out=tiles.copies_SGH[1])
            q_of_spans = _of(tiles.spans, q_BGRH)
            out_BGRH, size_BGR = self._attend_tiles(q_of_spans, *tiles.copied_BGKH, tiles.mask_B1RK)
            results.append((tiles.spans, out_BGRH, size_BGR))
        if len(run.key_tiles) == len(run.key_tiles[0].spans) == 1:
            return results[0][1]
        return weighted_mean(results, q_BGRH)

    def _attend_tiles(self, *operands: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_BGRH and size_BGR, log of the sum of exponentials.  operands: queries, keys, values, mask.

        torch would split the single product of one tile and head among its threads, so it is computed twice."""
        num_tiles, num_heads = operands[0].shape[:2]
        if num_tiles * num_heads == 1:
            operands = tuple(one.expand(2, -1, -1, -1) for one in operands)
        q_BGRH, k_BGKH, v_BGKH, mask_B1RK = operands
        out_BGRH, size_BGR = _attend(q_BGRH, k_BGKH, v_BGKH, 0.0, False, attn_mask=mask_B1RK, scale=self.spec.scale)
        return out_BGRH[:num_tiles], size_BGR[:num_tiles]

    def _key_tiles(self, spans: Spans, slots: Tensor, mask_B1RK: Tensor) -> KeyTiles:
        keys_SGH, values_SGH = self._copies_2SGH[:, : slots.shape[0]]
        tiles = (-1, KEYS, *keys_SGH.shape[1:])
        seen = (mask_B1RK.shape[0], -1, -1, -1)
        keys_BGKH, values_BGKH = (one.view(tiles).transpose(1, 2).expand(seen) for one in (keys_SGH, values_SGH))
        return KeyTiles(spans, slots, mask_B1RK, (keys_SGH, values_SGH), (keys_BGKH, values_BGKH))

    def _run(
        self,
        rows_BP: npt.NDArray[np.int64],
        tiles_Y: npt.NDArray[np.int64],
        places_Y: npt.NDArray[np.int64],
        written_Y: npt.NDArray[np.int64],
        count: int,
        key_tiles: list[KeyTiles],
    ) -> TileRun:
        """Return the run.

        rows_BP: rows of T at a tile's positions.  tiles_Y, places_Y: tile and position in it of each wanted token,
        which is written to written_Y; count: tokens of the step."""
        heads = self.spec.num_heads
        taken = rows_BP[:, self._place_R][:, None] * heads + self._head_GR
        firsts_Y = tiles_Y * (self._rows * self.spec.num_kv_heads) + places_Y * self._position_results
        kept = firsts_Y[:, None] + self._result_N
        whole = len(written_Y) == count and (written_Y[1:] > written_Y[:-1]).all()
        written = None if whole else torch.from_numpy(written_Y)
        return TileRun(torch.from_numpy(taken.ravel()), torch.from_numpy(kept.ravel()), written, tuple(key_tiles))

    def _plan(self, batch: AttentionBatch, table_BP: Int32, window: int) -> list[TileRun]:
        starts = np.concatenate(([0], np.cumsum(batch.host_query_lengths)))
        single = np.flatnonzero(batch.host_query_lengths == 1)
        lengths = batch.host_lengths.astype(np.int64)
        positions = lengths - 1
        # Most tiles first: then the rows that meet a key tile number are always the first ones.
        firsts = self._first_key_tile(positions, window)
        single = single[np.argsort(firsts[single] - positions[single] // KEYS, kind="stable")]
        runs = [
            self._decode_run(table_BP, rows, starts, lengths[rows], firsts[rows], window)
            for rows in (single[at : at + self._together] for at in range(0, len(single), self._together))
        ]
        for row in np.flatnonzero(batch.host_query_lengths > 1).tolist():
            first, last = int(starts[row]), int(starts[row + 1])
            behind = int(lengths[row]) - last  # difference between a place in T and its position
            step = self._most_positions(int(lengths[row]), last - first, window)
            for at in range(first, last, step):
                end = min(at + step, last)
                runs.append(self._prefill_run(table_BP[row], at, end - at, end + behind, int(starts[-1]), window))
        return runs

    def _most_positions(self, length: int, count: int, window: int) -> int:
        """Return how many of a sequence's last ``count`` positions a run may have within ``RESULT_BYTES``."""
        num_keys = min(length, count + window) if window else length
        row_bytes = self.spec.num_kv_heads * self.spec.head_size * self.pool.dtype.itemsize
        tile_bytes = self._rows * row_bytes * (num_keys // KEYS + 2)
        return max(1, RESULT_BYTES // tile_bytes) * self._positions

    def _first_key_tile(self, position: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
        """Return the first key tile that any position of a position's query tile sees."""
        if not window:
            return np.zeros_like(position)
        return np.maximum(0, position // self._positions * self._positions + 1 - window) // KEYS

    def _decode_run(
        self,
        table_BP: Int32,
        rows: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        firsts_B: npt.NDArray[np.int64],
        window: int,
    ) -> TileRun:
        """Return a run.  rows: sequences with one query, most key tiles first.  starts: the place of each in T."""
        counts_B = (lengths_B - 1) // KEYS + 1 - firsts_B
        # For each key tile, in order, the number of rows that meet it, which are the first ones.
        meeting = (counts_B > np.arange(counts_B[0])[:, None]).sum(1)
        of_P = np.concatenate([np.arange(count) for count in meeting])  # the row of each pair of a row and a key tile
        numbers_P = np.repeat(np.arange(len(meeting)), meeting)
        keys_PK = (firsts_B[of_P] + numbers_P)[:, None] * KEYS + np.arange(KEYS)
        ends_P1 = lengths_B[of_P, None]
        hidden_PK = keys_PK >= ends_P1
        if window:
            hidden_PK |= keys_PK < ends_P1 - window
        # The other rows of the tile do not matter: they all get this row's query and mask.
        mask_PK = torch.from_numpy(np.where(hidden_PK, np.float32(HIDDEN), np.float32(0))).to(self.pool.data.dtype)
        mask_P1RK = mask_PK[:, None, None].expand(-1, 1, self._rows, -1)
        slots_PK = self._slots(table_BP, rows[of_P, None], np.minimum(keys_PK, ends_P1 - 1)).view(-1, KEYS)
        tiles = []
        first = 0
        for spans in _filled(meeting.tolist(), self._together):
            last = first + sum(end for _, end in spans)
            tiles.append(self._key_tiles(spans, slots_PK[first:last].flatten(), mask_P1RK[first:last]))
            first = last
        at_B = starts[rows]
        order_B = np.argsort(at_B)
        places_B = (lengths_B - 1) % self._positions
        rows_BP = at_B[:, None].repeat(self._positions, 1)
        return self._run(rows_BP, order_B, places_B[order_B], at_B[order_B], int(starts[-1]), tiles)

    def _prefill_run(
        self, table_P: Int32, first_row: int, count: int, length: int, step_tokens: int, window: int
    ) -> TileRun:
        """Return the run of a chunk of a prompt: rows first_row on of T, the last ``count`` positions of the sequence.

        The last query tile comes first, so that a mask, which moves by a tile's positions each time, can be a view of
        one strip."""
        size = self._positions
        start = length - count
        first_tile, last_tile = start // size, (length - 1) // size
        tile_starts = np.arange(last_tile, first_tile - 1, -1) * size
        rows_BP = np.clip(tile_starts[:, None] + np.arange(size) - start, 0, count - 1) + first_row
        wanted_Y = np.arange(start, length)
        newest = int(tile_starts[0])
        strip_RX, zero = self._strip(newest + KEYS, window)
        tiles = []
        first_keys = self._first_key_tile(tile_starts, window)
        for number in range(int(first_keys[-1]), (length - 1) // KEYS + 1):
            key = number * KEYS
            last = int((tile_starts + size - 1 >= key).sum())
            first = int((first_keys > number).sum())
            slots = self._slots(table_P[None], np.zeros(1, np.int64), np.minimum(key + np.arange(KEYS), length - 1))
            # In the strip, column zero + x is the mask of a tile's first position for the key x places after it.
            offset = zero + key - (newest - first * size)
            shape, strides = (last - first, 1, len(strip_RX), KEYS), (size, 0, strip_RX.stride(0), 1)
            tiles.append(self._key_tiles(((first, last),), slots, strip_RX.as_strided(shape, strides, offset)))
        written_Y = wanted_Y - start + first_row
        return self._run(rows_BP, last_tile - wanted_Y // size, wanted_Y % size, written_Y, step_tokens, tiles)

    def _strip(self, longest: int, window: int) -> tuple[Tensor, int]:
        """Return the mask of a query tile's rows, and the column of its first position.

        Its keys are those from ``longest`` before that position to one key tile after it."""
        position_R1 = np.minimum(np.arange(self._rows) // self._heads, self._positions - 1)[:, None]
        distance_RX = np.arange(-longest, KEYS + self._positions) - position_R1
        hidden_RX = distance_RX > 0
        if window:
            hidden_RX |= distance_RX <= -window
        strip_RX = np.where(hidden_RX, np.float32(HIDDEN), np.float32(0))
        return torch.from_numpy(strip_RX).to(self.pool.data.dtype), longest

    def _slots(self, table_BP: Int32, row: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
        """Return the slots, flat, of positions in the table's rows."""
        size, stride = self.pool.page_size, self.pool.page_stride
        pages = table_BP[row, positions // size].astype(np.int64)
        return torch.from_numpy((pages * stride + positions % size).ravel())


def weighted_mean(results: list[tuple[Spans, Tensor, Tensor]], q_BGRH: Tensor) -> Tensor:
    """Return out_BGRH, float32, from the results of key tiles in order: (spans, out_BGRH, size_BGR).

    size_BGR: logarithm of the sum of exponentials.  Each row depends on its own numbers alone, through operations that
    are exact or the same for every place of an element."""
    largest_BGR = torch.full(q_BGRH.shape[:-1], -torch.inf)
    for spans, _, size_BGR in results:
        for (first, last), of_span in zip(spans, _split(spans, size_BGR), strict=True):
            part = largest_BGR[first:last]
            torch.maximum(part, of_span, out=part)
    total_BGRH = torch.zeros(q_BGRH.transpose(1, 2).shape).transpose(1, 2)  # in the layout of results
    weight_BGR = torch.zeros(q_BGRH.shape[:-1])
    for spans, out_BGRH, size_BGR in results:
        shares_BGR = size_BGR.sub(_of(spans, largest_BGR)).exp_()
        parts_BGRH = out_BGRH.float().mul_(shares_BGR[..., None])
        of_spans = zip(spans, _split(spans, parts_BGRH), _split(spans, shares_BGR), strict=True)
        for (first, last), part_BGRH, share_BGR in of_spans:
            total_BGRH[first:last].add_(part_BGRH)
            weight_BGR[first:last].add_(share_BGR)
    return total_BGRH.div_(weight_BGR[..., None])


def _of(spans: Spans, of_run: Tensor) -> Tensor:
    """Return the parts of the query tiles of all spans, one span after the other."""
    parts = [of_run[first:last] for first, last in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(spans: Spans, of_spans: Tensor) -> Sequence[Tensor]:
    return of_spans.split([last - first for first, last in spans])


def _filled(meeting: list[int], most: int) -> list[Spans]:
    """Return the first rows of each key tile as spans of calls with at most ``most`` pairs; no span is split."""
    calls: list[list[tuple[int, int]]] = [[]]
    room = most
    for count in meeting:
        if count > room:
            calls.append([])
            room = most
        calls[-1].append((0, count))
        room -= count
    return [tuple(spans) for spans in calls]


def built(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    """Return the attention in C, whose order of sums is fixed, if it serves such pages; else this one."""
    return compiled_attention(spec, pool) or TiledAttention(spec, pool)


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for any head size, page size and window on the CPU; float32 uses C if there is a compiler."""
    decode_options("attention.tiles", context.options, Options)
    return built
