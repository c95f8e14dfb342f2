"""Attention by FlashInfer: a step's decode rows and its prefill segments, each by the kernel for it.

Legend: T new tokens in the step · B sequences · D decode rows (the first D of B) · R rows of a captured graph
        I entries of page lists · P page-table width · N query heads · H head size
Owns: what happens in a step, and which rows and layers go where.  Does not know: how a kernel is planned or called.
"""

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.plugins.attention.flashinfer.kernels import DecodeRows, GraphRows, Planner, PrefillSegments, Setup
from engine.plugins.attention.flashinfer.lists import HostLists, Int32, gather_pages, stride_of
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.support.paging import padding_on_dump_page, pages_of, variant_of, windows_of

STEPS_IN_FLIGHT = 2  # the engine's deepest overlap
BUFFERS = STEPS_IN_FLIGHT + 1  # of every kind: one per step that may be queued, and the one that is filled


class FlashInferAttention:
    """See ``AttentionBackend``.  Never waits for the device unless more than ``STEPS_IN_FLIGHT`` steps are queued."""

    def __init__(self, setup: Setup, lists: StagingRing, prefill_backend: str, phases: tuple[str, ...]) -> None:
        """phases: 'prefill', 'decode' or both; a wrapper takes memory, and its kernels may have to be compiled."""
        self._setup = setup
        self._lists = lists
        self._decode: list[Planner] = []
        self._prefill: list[Planner] = []
        for window in windows_of(setup.spec):
            if "decode" in phases:
                self._decode.append(DecodeRows(setup, window))
            if "prefill" in phases:
                self._prefill.append(PrefillSegments(setup, window, prefill_backend))
        self._pages = pages_of(setup.pool)
        self._num_decodes = 0

    def plan_step(self, batch: AttentionBatch) -> None:
        """See ``AttentionBackend.plan_step``."""
        count = self._num_decodes = batch.num_decodes
        table_BP = padding_on_dump_page(batch, self._setup.pool)
        lengths, query_lengths = batch.host_lengths, batch.host_query_lengths
        if count:
            self._plan(table_BP[:count], lengths[:count], query_lengths[:count], self._decode)
        if count < len(lengths):
            self._plan(table_BP[count:], lengths[count:], query_lengths[count:], self._prefill)

    def _plan(self, table_BP: Tensor, lengths: Int32, query_lengths: Int32, planners: list[Planner]) -> None:
        host = HostLists(self._lists, lengths, query_lengths, self._setup.pool.page_size)
        starts_and_last = host.starts_and_last.to(table_BP.device, non_blocking=True)
        pages_I1 = table_BP.new_empty(host.num_pages + 1)
        gather_pages(table_BP, starts_and_last[: len(lengths) + 1], pages_I1)
        for planner in planners:
            planner.plan(host, pages_I1[:-1], query_lengths)
        host.staging.sent()

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """See ``AttentionBackend.attend``."""
        # Not left to the library: it would fill prefill results with zeros first, in every layer.
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        variant = variant_of(self._setup.spec, layer)
        if count := self._num_decodes:
            self._decode[variant].run(q_TNH[:count], self._pages[layer], out_TNH[:count])
        if count < len(q_TNH):
            self._prefill[variant].run(q_TNH[count:], self._pages[layer], out_TNH[count:])
        return out_TNH

    def for_graph(self, num_rows: int, max_pages: int) -> AttentionBackend:
        """See ``AttentionBackend``.  ``attend`` takes a query for every row of the graph, and runs before its capture.

        What it returns for the rows that ``plan_step`` was not given has no meaning."""
        return GraphAttention(self._setup, self._lists, num_rows, max_pages)


class GraphAttention(FlashInferAttention):
    """See ``FlashInferAttention.for_graph``.  All that its kernels read lies where it lay at the capture."""

    def __init__(self, setup: Setup, lists: StagingRing, num_rows: int, max_pages: int) -> None:
        super().__init__(setup, lists, prefill_backend="", phases=())
        device = setup.pool.data.device
        self._num_decodes = num_rows
        self._starts_and_last = torch.zeros(2 * stride_of(num_rows), dtype=torch.int32, device=device)
        self._starts_B1 = self._starts_and_last[: num_rows + 1]
        self._pages_I1 = torch.full((num_rows * max_pages + 1,), setup.pool.dump_page, dtype=torch.int32, device=device)
        self._decode = [
            GraphRows(setup, window, num_rows, self._starts_and_last, self._pages_I1[:-1])
            for window in windows_of(setup.spec)
        ]
        self._one_query_each = np.ones(num_rows, dtype=np.int32)

    def plan_step(self, batch: AttentionBatch) -> None:
        """See ``AttentionBackend``.  Rows that the batch does not have get one token each, of the dump page."""
        count, num_rows = len(batch.host_lengths), self._num_decodes
        assert batch.num_decodes == count <= num_rows, f"{batch.num_decodes} of {count} rows, captured for {num_rows}"
        lengths = np.ones(num_rows, dtype=np.int32)
        lengths[:count] = batch.host_lengths
        host = HostLists(self._lists, lengths, self._one_query_each, self._setup.pool.page_size)
        assert host.num_pages < len(self._pages_I1), f"{host.num_pages} pages, captured for {len(self._pages_I1) - 1}"
        self._starts_and_last.copy_(host.starts_and_last, non_blocking=True)
        gather_pages(padding_on_dump_page(batch, self._setup.pool), self._starts_B1[: count + 1], self._pages_I1)
        if count < num_rows:
            self._pages_I1[host.num_pages - (num_rows - count) : host.num_pages].fill_(self._setup.pool.dump_page)
        for planner in self._decode:
            planner.plan(host, self._pages_I1[:-1], self._one_query_each)
        host.staging.sent()
