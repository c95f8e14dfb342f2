"""FlashAttention 2 and 3: the arguments of each for a part of a step, and every call into them.

Legend: B sequences · T tokens · P page-table width · N query heads · H head size
Owns: the arguments.  Does not know: which library has a function, batches, layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.support.paging import KVPages

QUERY_TILE = 128  # queries per block of FA3, over all heads that share a key head


@dataclass(frozen=True, slots=True)
class CallPart:
    """Adjacent sequences of a step that one call serves: decode rows, or segments of prompts.

    page_table_BP, lengths_B, query_starts_B1: as in ``AttentionBatch``, with starts relative to the part's first query.
    max_queries, max_length: of one sequence.  num_tiles: pieces of work, if no keys are split.
    """

    decode: bool
    page_table_BP: Tensor
    lengths_B: Tensor
    query_starts_B1: Tensor
    max_queries: int
    max_length: int
    num_tiles: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The arguments that a part's calls share in all layers of a window.

    window: (left, right) of a query, -1 for no limit.
    num_splits: number of pieces that keys are split into, 0 for the kernel's choice.
    key_starts_B1: cumulative lengths, for FA2's prefill.  metadata: the work of each block, for FA3.
    """

    window: tuple[int, int]
    num_splits: int = 0
    key_starts_B1: Tensor | None = None
    metadata: Tensor | None = None


class Kernels(Protocol):
    """One generation of FlashAttention."""

    def prepare(self, part: CallPart, window: int) -> Prepared:
        """Prepare a step's calls for the layers with this window; 0 for no window."""
        ...

    def run(self, layer: int, q_TNH: Tensor, pages: KVPages, part: CallPart, prepared: Prepared) -> Tensor:
        """Return out_TNH of the part's queries in one layer."""
        ...


@dataclass(frozen=True, slots=True)
class FA2:
    """FlashAttention 2, with pages of a multiple of 256 tokens.

    It splits keys by the width of the page table, so a table should not be wider than its longest row."""

    spec: AttentionSpec
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]

    def prepare(self, part: CallPart, window: int) -> Prepared:
        if part.decode:
            return Prepared(window_size(window))
        key_starts_B1 = part.lengths_B.new_zeros(len(part.lengths_B) + 1)
        torch.cumsum(part.lengths_B, 0, dtype=torch.int32, out=key_starts_B1[1:])
        return Prepared(window_size(window), key_starts_B1=key_starts_B1)

    def run(self, layer: int, q_TNH: Tensor, pages: KVPages, part: CallPart, prepared: Prepared) -> Tensor:
        keys, values = pages
        if part.decode:
            return self.with_kvcache(
                q_TNH[:, None],
                keys,
                values,
                cache_seqlens=part.lengths_B,
                block_table=part.page_table_BP,
                softmax_scale=self.spec.scale,
                causal=True,
                window_size=prepared.window,
            )[:, 0]
        return self.varlen(
            q_TNH,
            keys,
            values,
            cu_seqlens_q=part.query_starts_B1,
            cu_seqlens_k=prepared.key_starts_B1,
            max_seqlen_q=part.max_queries,
            max_seqlen_k=part.max_length,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=prepared.window,
            block_table=part.page_table_BP,
        )


@dataclass(frozen=True, slots=True)
class FA3:
    """FlashAttention 3, with pages of any size.  The GPU assigns work to blocks, once a step with
    ``scheduler_metadata``.

    invariant: keys are never split, at a cost for decode rows with a long context.
    Of latents, the rotated parts are keys of their own, and the rest of a query is multiplied by the values.
    With float8 pages it computes in float8: queries are rounded like keys and values, without a scale; the kernel
    rounds weights, and returns bfloat16."""

    spec: AttentionSpec
    pool: KVPool
    num_sms: int
    with_kvcache: Callable[..., Any]
    scheduler_metadata: Callable[..., Tensor] | None
    invariant: bool = False

    def prepare(self, part: CallPart, window: int) -> Prepared:
        # Split keys have partial results of (pieces x heads x queries) in float32: for a long prompt, gigabytes.
        fills = not part.decode and part.num_tiles >= self.num_sms
        num_splits = 1 if fills or self.invariant else 0
        if self.scheduler_metadata is None:
            return Prepared(window_size(window), num_splits)
        spec, page_size = self.spec, self.pool.page_size
        metadata = self.scheduler_metadata(
            len(part.lengths_B),
            part.max_queries,
            # The kernel's own bound on the longest sequence; another number would give another layout.
            part.page_table_BP.shape[1] * page_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size - spec.latent_size,
            part.lengths_B,
            qkv_dtype=self.pool.format.stored,
            headdim_v=spec.value_size,
            cu_seqlens_q=part.query_starts_B1,
            page_size=page_size,
            causal=True,
            window_size=window_size(window),
            num_splits=num_splits,
        )
        return Prepared(window_size(window), num_splits, metadata=metadata)

    def run(self, layer: int, q_TNH: Tensor, pages: KVPages, part: CallPart, prepared: Prepared) -> Tensor:
        keys, values = pages
        form = self.pool.format
        rounded_TNH = q_TNH if form.plain else form.numbers(form.encode(q_TNH))
        more: dict[str, Tensor] = {"sinks": self.spec.sinks[layer]} if self.spec.sinks else {}
        if size := self.spec.latent_size:
            rounded_TNH, more["qv"] = q_TNH[..., size:], q_TNH[..., :size]
        out_TNH: Tensor = self.with_kvcache(
            rounded_TNH,
            keys,
            values,
            cache_seqlens=part.lengths_B,
            page_table=part.page_table_BP,
            cu_seqlens_q=part.query_starts_B1,
            max_seqlen_q=part.max_queries,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=prepared.window,
            scheduler_metadata=prepared.metadata,
            num_splits=prepared.num_splits,
            **more,
        )
        return out_TNH.to(q_TNH.dtype)


def window_size(window: int) -> tuple[int, int]:
    """Return (left, right) for the library, which does not count the query's own position.  -1 is no limit."""
    return (window - 1, 0) if window else (-1, -1)
