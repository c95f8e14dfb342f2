"""Attention by FlashAttention: a step's decode rows and its prompts, each by one call a layer.

Legend: T new tokens in the step · B sequences · D decode rows (the first D of B) · R rows of a captured graph
        P page-table width · N query heads · H head size
Owns: what happens in a step, and which rows and layers go where.  Does not know: how a kernel is called.
"""

import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flash_attn.kernels import QUERY_TILE, Kernels, Part, Prepared
from engine.plugins.support.paging import padding_on_dump_page, pages_of, variant_of, windows_of


class FlashAttention:
    """See ``AttentionBackend``.  Plans nothing on the host and never waits for the device.

    Decode rows and prompts are never one call: a kernel for long queries wastes 127 of 128 rows of a tile on a decode
    row, and what divides the keys of one in many would do so to all tokens of a prompt.
    """

    def __init__(self, spec: AttentionSpec, pool: KVPool, kernels: Kernels) -> None:
        self._spec = spec
        self._pool = pool
        self._kernels = kernels
        self._windows = windows_of(spec)
        self._pages = pages_of(pool)
        self._parts: list[Part] = []
        self._prepared: list[list[Prepared]] = []

    def plan_step(self, batch: AttentionBatch) -> None:
        """See ``AttentionBackend.plan_step``."""
        self._parts = cut(batch, self._spec, self._pool)
        self._prepared = [[self._kernels.prepare(part, window) for part in self._parts] for window in self._windows]

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """See ``AttentionBackend.attend``."""
        variant = variant_of(self._spec, layer)
        outs, first = [], 0
        for part, prepared in zip(self._parts, self._prepared[variant], strict=True):
            last = first + len(part.lengths_B) if part.decode else len(q_TNH)
            outs.append(self._kernels.run(q_TNH[first:last], self._pages[layer], part, prepared))
            first = last
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def for_graph(self, num_rows: int, max_pages: int) -> AttentionBackend:
        """See ``AttentionBackend``.  ``attend`` takes a query for every row of the graph, and runs before its capture.

        What it returns for the rows that ``plan_step`` was not given has no meaning."""
        return GraphAttention(self._spec, self._pool, self._kernels, num_rows, max_pages)


class GraphAttention(FlashAttention):
    """See ``FlashAttention.for_graph``.  All that its kernels read lies where it lay at the capture."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, kernels: Kernels, num_rows: int, max_pages: int) -> None:
        super().__init__(spec, pool, kernels)
        device = pool.data.device
        self._part = Part(
            decode=True,
            page_table_BP=torch.full((num_rows, max_pages), pool.dump_page, dtype=torch.int32, device=device),
            lengths_B=torch.ones(num_rows, dtype=torch.int32, device=device),
            query_starts_B1=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            max_queries=1,
            max_length=max_pages * pool.page_size,
            num_tiles=num_rows * spec.num_kv_heads,
        )
        self._parts = [self._part]

    def plan_step(self, batch: AttentionBatch) -> None:
        """See ``AttentionBackend``.  Rows that the batch does not have get one token each, of the dump page."""
        table_RP, lengths_R = self._part.page_table_BP, self._part.lengths_B
        count, num_rows = len(batch.host_lengths), len(lengths_R)
        assert batch.num_decodes == count <= num_rows, f"{batch.num_decodes} of {count} rows, captured for {num_rows}"
        longest, limit = int(batch.host_lengths.max()), self._part.max_length
        assert longest <= limit, f"{longest} tokens in a row, captured for {limit}"
        table_BP = padding_on_dump_page(batch, self._pool)[:, : table_RP.shape[1]]
        table_RP[:count, : table_BP.shape[1]].copy_(table_BP)
        lengths_R[:count].copy_(positive_lengths(batch))
        if count < num_rows:
            table_RP[count:, 0].fill_(self._pool.dump_page)
            lengths_R[count:].fill_(1)
        prepared = [[self._kernels.prepare(self._part, window)] for window in self._windows]
        if not self._prepared:
            self._prepared = prepared
        for (captured,), (new,) in zip(self._prepared, prepared, strict=True):
            if captured.metadata is not None and new.metadata is not None:
                captured.metadata.copy_(new.metadata)


def cut(batch: AttentionBatch, spec: AttentionSpec, pool: KVPool) -> list[Part]:
    """The decode rows and the prompts of a step; at least one part."""
    count, parts = batch.num_decodes, []
    table_BP, lengths_B = padding_on_dump_page(batch, pool), positive_lengths(batch)
    if count:
        parts.append(
            Part(
                decode=True,
                page_table_BP=table_BP[:count],
                lengths_B=lengths_B[:count],
                query_starts_B1=batch.query_starts_B1[: count + 1],
                max_queries=1,
                max_length=int(batch.host_lengths[:count].max()),
                num_tiles=count * spec.num_kv_heads,
            )
        )
    if count < len(batch.host_lengths):
        query_lengths = batch.host_query_lengths[count:]
        num_tiles = -(-query_lengths * (spec.num_heads // spec.num_kv_heads) // QUERY_TILE)
        parts.append(
            Part(
                decode=False,
                page_table_BP=table_BP[count:],
                lengths_B=lengths_B[count:],
                # Every decode row has one query, so the host knows where the prompts begin.
                query_starts_B1=batch.query_starts_B1[count:] - count,
                max_queries=int(query_lengths.max()),
                max_length=int(batch.host_lengths[count:].max()),
                num_tiles=int(num_tiles.sum()) * spec.num_kv_heads,
            )
        )
    return parts


def positive_lengths(batch: AttentionBatch) -> Tensor:
    """lengths_B, in which rows that only pad have a token, as they have a page."""
    return batch.lengths_B if batch.host_lengths.all() else batch.lengths_B.clamp(min=1)
