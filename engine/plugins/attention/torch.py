"""Attention in torch: the reference for other backends, and the backend for CPUs.

Legend: T new tokens in the step (ragged, packed) · B decode rows of a group · n queries of a sequence
        L visible keys · S slots of the pool or of a page · P pages · N query heads · G KV heads · H head size
        R size of a record of the pool
Owns: the reads, of each sequence's own slots only, and the masks.  Does not know: models, the scheduler.

A step's sequences are served in three ways, chosen by measurement (``benchmarks/bench_attention.py``): adjacent decode
rows whose keys together fit a core's cache are copied into one padded batch, as separate calls would take longer than
the copies; a single sequence with adjacent pages is read in place; any other has its pages copied together first.  All
copies go to one buffer that sequences and layers reuse, as fresh memory for each would cost several times as much: with
scattered pages it is 1.9 to 19 times as fast as gathering all keys before attention, on one thread.  Not copying is
slower: torch's flex_attention, compiled to read pages in place, takes 1.1 to 3.8 times as long, and needs a C++
compiler; a pass page by page takes 2.2 to 73 times as long.
No stale slot is ever multiplied, not even by 0, so a NaN in one cannot spread.

On a CPU with a compiler, if pages keep float32, ``engine/kernels/attention.c`` is used instead, in a sixth to seven
tenths of the time (``benchmarks/bench_cpu_attention.py``).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.attention import compiled_attention
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionFactory, AttentionSpec
from engine.layers.attention_chunks import in_chunks
from engine.layers.kv_pool import KVPool
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu", "cuda"],
    "dtypes": ["float32", "bfloat16", "float16"],
    "kv_layouts": ["layer_first", "page_first"],
    "kv_dtypes": ["float32", "bfloat16", "float16", "int8", "fp8_e4m3"],
    "supports": ["soft_cap", "sinks", "layer_windows", "latents", "chunks"],
}
# Keys up to this size stay in a core's cache between their copy and their use, and between the passes of heads.
CACHED_BYTES = 1 << 20
# Most padded keys of a group, relative to its rows' own keys.
PADDING = 1.5
# A block of queries reads no key past its last query: blocks of 128 save a third of a 512-token prefill.
QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, rows first_row:last_row of T, each with num_keys keys after padding.

    slots: places of the keys, row after row; the padding repeats a row's last slot.  mask: hides the padding.
    """

    first_row: int
    last_row: int
    num_keys: int
    slots: Tensor
    mask_B11L: Tensor


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
    """One sequence's part of a step: rows first_row:last_row of T, and the places of its num_keys keys.

    pages: pages to copy together; None if the keys are read in place.
    first_slot: of the first key, in the pool or in the copy.  blocks: empty for a single query, which sees all keys.
    """

    first_row: int
    last_row: int
    num_keys: int
    first_slot: int
    pages: Tensor | None
    blocks: tuple[Block, ...]


class TorchAttention:
    """An ``AttentionBackend`` for the CPU and for a GPU, where it never waits for the device."""

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        records_SGR = pool.keys(0).view(pool.format.memory)
        seen = (records_SGR.shape[1], pool.head_size)
        assert seen == (spec.num_kv_heads, spec.head_size), f"a pool of {seen} is not for {spec}"
        if spec.chunked and spec.window % pool.page_size:
            expected = f"a page size that divides the model's chunks of {spec.window} tokens; set kv.page_size"
            raise PluginError(f"pages of {pool.page_size} tokens, expected {expected}")
        self.spec = spec
        self.pool = pool
        self.group = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_size)
        self.page_shape = (-1, pool.page_size, *records_SGR.shape[1:])
        self._plain = pool.format.plain
        self._pages_touch = pool.page_stride == pool.page_size
        # torch's own attention has no caps and sinks, and would copy a latent for each of many heads.
        self.weighs = bool(spec.soft_cap or spec.sinks or spec.latent_size)
        self.slot_bytes = spec.num_kv_heads * spec.head_size * pool.dtype.itemsize
        self._record_copy_SGR = records_SGR.new_empty((0, *records_SGR.shape[1:]))
        self._key_copy_SGH = self._value_copy_SGH = records_SGR.new_empty((0, *seen), dtype=pool.dtype)
        self._whole: list[DecodeGroup | Segment] = []
        self._windowed: list[DecodeGroup | Segment] = []

    def plan_step(self, batch: AttentionBatch) -> None:
        """Find every sequence's keys, once for all layers."""
        self._reserve(int(batch.host_lengths.max()))
        if not self.spec.window or self.spec.first_window_layer or self.spec.full_layers:
            self._whole = self._plan(batch, 0)
        if self.spec.chunked:
            self._windowed = self._plan(in_chunks(batch, self.spec.window, self.pool.page_size), 0)
        elif self.spec.window:
            self._windowed = self._plan(batch, self.spec.window)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        keys_SGR, values_SGR = self.pool.keys(layer), self.pool.values(layer)
        copy_SGH, latent_size = self._value_copy_SGH, self.spec.latent_size
        outs = []
        for part in self._windowed if self.spec.window_of(layer) else self._whole:
            q_nNH = q_TNH[part.first_row : part.last_row]
            k_BGLH = self._visible(part, keys_SGR, self._key_copy_SGH)
            v_BGLH = k_BGLH[..., :latent_size] if latent_size else self._visible(part, values_SGR, copy_SGH)
            if isinstance(part, Segment) and part.blocks:
                outs.append(self._attend_blocks(layer, q_nNH, k_BGLH, v_BGLH, part.blocks))
            else:
                # A group's query heads are passed as queries of one sequence: keys are read once, not N / G times.
                mask = part.mask_B11L if isinstance(part, DecodeGroup) else None
                q_BGnH = q_nNH.view(-1, *self.group)
                if self.weighs:
                    out = self._weigh(layer, q_BGnH, k_BGLH, v_BGLH, mask)
                else:
                    out = F.scaled_dot_product_attention(q_BGnH, k_BGLH, v_BGLH, attn_mask=mask, scale=self.spec.scale)
                outs.append(out.reshape(*q_nNH.shape[:2], -1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_blocks(
        self, layer: int, q_nNH: Tensor, k_1GLH: Tensor, v_1GLH: Tensor, blocks: tuple[Block, ...]
    ) -> Tensor:
        q_1NnH = q_nNH.transpose(0, 1)[None]
        outs = []
        for block in blocks:
            q, keys = q_1NnH[:, :, block.first : block.last], slice(block.key_first, block.key_last)
            k, v = k_1GLH[:, :, keys], v_1GLH[:, :, keys]
            if self.weighs:
                # The queries of a group's heads in sequence, as one sequence of queries.
                mask = block.mask.repeat(self.group[1], 1)
                out = self._weigh(layer, q.reshape(1, self.group[0], -1, self.group[2]), k, v, mask)
                out = out.view(*q.shape[:3], -1)
            else:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=block.mask, scale=self.spec.scale, enable_gqa=True
                )
            outs.append(out[0].transpose(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _weigh(self, layer: int, q_BGnH: Tensor, k_BGLH: Tensor, v_BGLH: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention with features that torch's own lacks: capped scores, sinks.  n: of all heads of a group."""
        scores_BGnL = (q_BGnH @ k_BGLH.mT).float().mul_(self.spec.scale)
        if cap := self.spec.soft_cap:
            scores_BGnL.div_(cap).tanh_().mul_(cap)
        if mask is not None:
            scores_BGnL += mask
        if not self.spec.sinks:
            return scores_BGnL.softmax(-1).to(v_BGLH.dtype) @ v_BGLH
        num_groups, heads, _ = self.group
        sinks_1Gn1 = self.spec.sinks[layer].float().view(1, num_groups, heads, 1)
        sinks_1Gn1 = sinks_1Gn1.repeat_interleave(q_BGnH.shape[2] // heads, 2)
        highest_BGn1 = torch.maximum(scores_BGnL.amax(-1, keepdim=True), sinks_1Gn1)
        weights_BGnL = scores_BGnL.sub_(highest_BGn1).exp_()
        weights_BGnL /= weights_BGnL.sum(-1, keepdim=True) + (sinks_1Gn1 - highest_BGn1).exp_()
        return weights_BGnL.to(v_BGLH.dtype) @ v_BGLH

    def _visible(self, part: DecodeGroup | Segment, slots_SGR: Tensor, copy_SGH: Tensor) -> Tensor:
        """Return the filled slots of a part's sequences as [B, G, L, H]."""
        if self._plain:
            found_LGH = self._found(part, slots_SGR, copy_SGH)
        else:
            found_LGR = self._found(part, slots_SGR.view(self.pool.format.memory), self._record_copy_SGR)
            found_LGH = copy_SGH[: len(found_LGR)]
            size = max(1, CACHED_BYTES // self.slot_bytes)  # decoding passes over its result more than once
            for records_LGR, part_LGH in zip(found_LGR.split(size), found_LGH.split(size), strict=True):
                self.pool.format.decode(records_LGR, part_LGH)
        if isinstance(part, DecodeGroup):
            return found_LGH.unflatten(0, (-1, part.num_keys)).transpose(1, 2)
        return found_LGH.transpose(0, 1)[None]

    def _found(self, part: DecodeGroup | Segment, slots_SGR: Tensor, copy_SGR: Tensor) -> Tensor:
        """Return the filled slots as [L, G, R], sequence after sequence, in place or in ``copy_SGR``."""
        if isinstance(part, DecodeGroup):
            return torch.index_select(slots_SGR, 0, part.slots, out=copy_SGR[: len(part.slots)])
        if part.pages is not None:
            copied_SGR = copy_SGR[: len(part.pages) * self.pool.page_size]
            pages_PSGR = slots_SGR.view(self.page_shape)
            torch.index_select(pages_PSGR, 0, part.pages, out=copied_SGR.view(self.page_shape))
            slots_SGR = copied_SGR
        return slots_SGR[part.first_slot : part.first_slot + part.num_keys]

    def _reserve(self, longest: int) -> None:
        """Make the copies large enough for the longest sequence, in whole pages, and for any group."""
        num_slots = max(longest + self.pool.page_size, CACHED_BYTES // self.slot_bytes)
        if num_slots > len(self._key_copy_SGH):
            shape = (1 << num_slots.bit_length(), *self._key_copy_SGH.shape[1:])
            self._key_copy_SGH = self._key_copy_SGH.new_empty(shape)
            self._value_copy_SGH = self._value_copy_SGH.new_empty(shape)
            if not self._plain:
                self._record_copy_SGR = self._record_copy_SGR.new_empty((shape[0], *self._record_copy_SGR.shape[1:]))

    def _plan(self, batch: AttentionBatch, window: int) -> list[DecodeGroup | Segment]:
        host_table = batch.page_table_BP.numpy() if batch.page_table_BP.device.type == "cpu" else None
        plan: list[DecodeGroup | Segment] = []
        for first, last in self._groups(batch, window):
            first_row = plan[-1].last_row if plan else 0
            if last - first > 1:
                plan.append(self._decode_group(batch, first, last, first_row, window))
            else:
                plan.append(self._segment(batch, first, first_row, window, host_table))
        return plan

    def _groups(self, batch: AttentionBatch, window: int) -> list[tuple[int, int]]:
        """Cut the sequences into runs: single queries that are best served together, all others alone."""
        groups: list[tuple[int, int]] = []
        first = num_keys = longest = 0
        single = (batch.host_query_lengths == 1).tolist()
        for row, length in enumerate(batch.host_lengths.tolist()):
            seen = min(length, window) if window else length
            padded = (row + 1 - first) * max(longest, seen)
            fits = padded * self.slot_bytes <= CACHED_BYTES and padded <= PADDING * (num_keys + seen)
            if row > first and not (fits and single[row] and single[first]):
                groups.append((first, row))
                first, num_keys, longest = row, 0, 0
            num_keys, longest = num_keys + seen, max(longest, seen)
        return [*groups, (first, len(single))]

    def _decode_group(self, batch: AttentionBatch, first: int, last: int, first_row: int, window: int) -> DecodeGroup:
        """Return the group of sequences first:last, the first of which is row first_row of T."""
        table_BP, page_size = batch.page_table_BP[first:last], self.pool.page_size
        lengths = batch.host_lengths[first:last]
        num_keys = int(min(lengths.max(), window) if window else lengths.max())
        lengths_B1 = batch.lengths_B[first:last, None]
        starts_B1 = (lengths_B1 - window).clamp_(min=0) if window else torch.zeros_like(lengths_B1)
        key_L = torch.arange(num_keys, dtype=torch.int32, device=table_BP.device)
        position_BL = torch.minimum(starts_B1 + key_L, lengths_B1 - 1)
        pages_BL = table_BP.gather(1, (position_BL // page_size).long())
        slots_BL = pages_BL * self.pool.page_stride + position_BL % page_size
        hidden_BL = key_L >= lengths_B1 - starts_B1
        mask_BL = torch.zeros(hidden_BL.shape, dtype=self.pool.dtype, device=table_BP.device)
        mask_BL.masked_fill_(hidden_BL, -torch.inf)
        last_row = first_row + last - first
        return DecodeGroup(first_row, last_row, num_keys, slots_BL.flatten(), mask_BL[:, None, None])

    def _segment(
        self, batch: AttentionBatch, row: int, first_row: int, window: int, host_table: npt.NDArray[np.int32] | None
    ) -> Segment:
        length, num_queries = int(batch.host_lengths[row]), int(batch.host_query_lengths[row])
        page_size = self.pool.page_size
        # No query sees a key before the first query's window, so a single query's window needs no mask.
        first_key = max(0, length - num_queries + 1 - window) if window else 0
        num_keys = length - first_key
        first_page, last_page = first_key // page_size, -(-length // page_size)
        first_slot = first_key - first_page * page_size
        pages: Tensor | None = batch.page_table_BP[row, first_page:last_page]
        if host_table is not None:
            own = host_table[row, first_page:last_page]
            if len(own) == 1 or (self._pages_touch and own[-1] - own[0] == len(own) - 1 and (own[1:] > own[:-1]).all()):
                pages, first_slot = None, int(own[0]) * self.pool.page_stride + first_slot
        if pages is not None and not self._pages_touch:
            pages = pages * (self.pool.page_stride // page_size)  # in units of the blocks that ``_found`` copies
        blocks = self._blocks(num_queries, num_keys, window, batch.page_table_BP.device)
        return Segment(first_row, first_row + num_queries, num_keys, first_slot, pages, blocks)

    def _blocks(self, num_queries: int, num_keys: int, window: int, device: torch.device) -> tuple[Block, ...]:
        """Cut a segment's queries, which are its last keys, into blocks with their causal masks."""
        if num_queries == 1:
            return ()
        blocks = []
        for first in range(0, num_queries, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, num_queries)
            position = num_keys - num_queries + first
            key_first = max(0, position + 1 - window) if window else 0
            key_last = num_keys - num_queries + last
            shape = (last - first, key_last - key_first)
            hidden = torch.full(shape, -torch.inf, dtype=self.pool.dtype, device=device)
            mask = hidden.triu(position - key_first + 1)
            if window:
                mask += hidden.tril(position - key_first - window)
            blocks.append(Block(first, last, key_first, key_last, mask))
        return tuple(blocks)


def built(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    """Return the attention in C if it serves such pages, else the one in torch."""
    return compiled_attention(spec, pool) or TorchAttention(spec, pool)


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for any head size, page size, window, cap and sinks, on the CPU and on NVIDIA GPUs.

    On a CPU with a compiler, float32 pages without cap and sinks use C."""
    decode_options("attention.torch", context.options, Options)
    return built
