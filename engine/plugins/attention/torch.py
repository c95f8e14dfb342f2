"""Attention in plain torch: the reference that other backends are compared with, and what runs on a CPU.

Legend: T new tokens in the step (ragged, packed) · n queries of a sequence · L keys it sees
        S slots of the pool or of a page · P pages · N query heads · G KV heads · H head size
Owns: reading each sequence's own slots and nothing else, the masks.  Does not know: models, the scheduler.

Every sequence gets its own call of torch's fused attention over exactly the keys it may see, so no masked slot
can leak a NaN (0 * NaN is NaN).  A short sequence whose pages lie side by side is read in place; otherwise its
pages are copied together into a buffer that all sequences and layers reuse.  Measured on one core at batch 8 to
32 (``benchmarks/bench_attention.py``): the reused buffer is 1.0 to 3 times faster than a fresh one, and faster
than reading a long sequence in place, because the copy runs through memory in order and attention does not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import PluginError
from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBatch, AttentionFactory, AttentionSpec
from engine.plugins.hookspecs import AttentionContext, hookimpl

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
# A block of queries reads no key past its last query: blocks of 128 save a third of a 512-token prefill.
QUERY_BLOCK = 128
# Keys up to this size stay in a core's cache between the heads' passes over them, so reading in place wins.
IN_PLACE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Queries first:last of a segment against its keys key_first:key_last; mask is added to the scores."""

    first: int
    last: int
    key_first: int
    key_last: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a step: rows first_row:last_row of T, and where its num_keys keys are.

    pages: what to copy together; None if the keys are read in place.
    first_slot: of the first key, in the pool or in the copy.  blocks: empty for a single query, which sees all keys.
    """

    first_row: int
    last_row: int
    num_keys: int
    first_slot: int
    pages: Tensor | None
    blocks: tuple[Block, ...]


class TorchAttention:
    """See ``AttentionBackend``.  Works on the CPU and on a GPU, where it never waits for the device."""

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        slots_SGH = pool.keys(0)
        assert slots_SGH.shape[1:] == (spec.num_kv_heads, spec.head_size), f"pool {slots_SGH.shape} is not for {spec}"
        self.spec = spec
        self.pool = pool
        self.group = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_size)
        self.page_shape = (-1, pool.page_size, spec.num_kv_heads, spec.head_size)
        self.slot_bytes = spec.num_kv_heads * spec.head_size * slots_SGH.element_size()
        self._key_copy_PSGH = self._value_copy_PSGH = slots_SGH.new_empty((0, *self.page_shape[1:]))
        self._whole: list[Segment] = []
        self._windowed: list[Segment] = []

    def begin(self, batch: AttentionBatch) -> None:
        """Find every sequence's keys, once for all layers."""
        num_pages = -(-int(batch.host_lengths.max()) // self.pool.page_size)
        if num_pages > len(self._key_copy_PSGH):
            shape = (1 << (num_pages - 1).bit_length(), *self.page_shape[1:])
            self._key_copy_PSGH = self._key_copy_PSGH.new_empty(shape)
            self._value_copy_PSGH = self._value_copy_PSGH.new_empty(shape)
        if not self.spec.window or self.spec.first_window_layer:
            self._whole = self._segments(batch, 0)
        if self.spec.window:
            self._windowed = self._segments(batch, self.spec.window)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """See ``AttentionBackend.attend``."""
        windowed = self.spec.window and layer >= self.spec.first_window_layer
        keys_SGH, values_SGH = self.pool.keys(layer), self.pool.values(layer)
        parts = [
            self._attend(
                segment,
                q_TNH[segment.first_row : segment.last_row],
                self._visible(segment, keys_SGH, self._key_copy_PSGH),
                self._visible(segment, values_SGH, self._value_copy_PSGH),
            )
            for segment in (self._windowed if windowed else self._whole)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, segment: Segment, q_nNH: Tensor, k_1GLH: Tensor, v_1GLH: Tensor) -> Tensor:
        if not segment.blocks:
            # A group's query heads take the place of a sequence of queries: its keys are read once, not N / G times.
            out = F.scaled_dot_product_attention(q_nNH.view(1, *self.group), k_1GLH, v_1GLH, scale=self.spec.scale)
            return out.reshape(q_nNH.shape)
        q_1NnH = q_nNH.transpose(0, 1)[None]
        parts = [
            F.scaled_dot_product_attention(
                q_1NnH[:, :, block.first : block.last],
                k_1GLH[:, :, block.key_first : block.key_last],
                v_1GLH[:, :, block.key_first : block.key_last],
                attn_mask=block.mask,
                scale=self.spec.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for block in segment.blocks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _visible(self, segment: Segment, slots_SGH: Tensor, copy_PSGH: Tensor) -> Tensor:
        """[1, G, L, H] of the slots that a segment's sequence has filled."""
        if segment.pages is not None:
            copied_PSGH = copy_PSGH[: len(segment.pages)]
            torch.index_select(slots_SGH.view(self.page_shape), 0, segment.pages, out=copied_PSGH)
            slots_SGH = copied_PSGH.flatten(0, 1)
        slot_stride, head_stride, _ = slots_SGH.stride()
        size = (1, self.spec.num_kv_heads, segment.num_keys, self.spec.head_size)
        offset = slots_SGH.storage_offset() + segment.first_slot * slot_stride
        return slots_SGH.as_strided(size, (0, head_stride, slot_stride, 1), offset)

    def _segments(self, batch: AttentionBatch, window: int) -> list[Segment]:
        table_BP, page_size = batch.page_table_BP, self.pool.page_size
        host_table = table_BP.numpy() if table_BP.device.type == "cpu" else None
        segments: list[Segment] = []
        first_row = 0
        lengths = zip(batch.host_lengths.tolist(), batch.host_query_lengths.tolist(), strict=True)
        for row, (length, num_queries) in enumerate(lengths):
            # Keys before the first query's window are nobody's; with a single query the window then needs no mask.
            first_key = max(0, length - num_queries + 1 - window) if window else 0
            num_keys = length - first_key
            first_page, last_page = first_key // page_size, -(-length // page_size)
            first_slot = first_key - first_page * page_size
            pages: Tensor | None = table_BP[row, first_page:last_page]
            if host_table is not None and num_keys * self.slot_bytes <= IN_PLACE_BYTES:
                own = host_table[row, first_page:last_page]
                if own[-1] - own[0] == len(own) - 1 and (own[1:] > own[:-1]).all():
                    pages, first_slot = None, int(own[0]) * page_size + first_slot
            blocks = self._blocks(num_queries, num_keys, window, table_BP.device)
            segments.append(Segment(first_row, first_row + num_queries, num_keys, first_slot, pages, blocks))
            first_row += num_queries
        return segments

    def _blocks(self, num_queries: int, num_keys: int, window: int, device: torch.device) -> tuple[Block, ...]:
        """Cut a segment's queries, which are the last of its keys, into blocks with their causal masks."""
        if num_queries == 1:
            return ()
        blocks = []
        for first in range(0, num_queries, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, num_queries)
            position = num_keys - num_queries + first
            key_first = max(0, position + 1 - window) if window else 0
            key_last = num_keys - num_queries + last
            shape = (last - first, key_last - key_first)
            hidden = torch.full(shape, -torch.inf, dtype=self.pool.data.dtype, device=device)
            mask = hidden.triu(position - key_first + 1)
            if window:
                mask += hidden.tril(position - key_first - window)
            blocks.append(Block(first, last, key_first, key_last, mask))
        return tuple(blocks)


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Any head size, page size and window; on the CPU and on NVIDIA GPUs."""
    if context.options:
        raise PluginError(f"attention.torch has no options; got {', '.join(sorted(context.options))}")
    if context.device not in DEVICES:
        raise PluginError(f"attention.torch runs on {' and '.join(DEVICES)}, not on {context.device!r}")
    if context.dtype not in DTYPES:
        raise PluginError(f"attention.torch computes in {', '.join(DTYPES)}, not in {context.dtype!r}")
    return TorchAttention
