"""Attention by FlashInfer: one kernel for a step's decode rows, and one for its prefill segments.

Legend: T new tokens in the step · B sequences · D decode rows (the first D of B) · R rows of a captured graph
        I entries of page lists · P page-table width · N query heads · H head size
Owns: the work of a step, and the split of rows and layers.  Does not know: the planning and calls of kernels.
"""

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.plugins.attention.flashinfer.kernels import DecodeRows, GraphRows, PrefillSegments, Setup, WrapperPlanner
from engine.plugins.attention.flashinfer.lists import DeviceLists, HostLists, Int32, gather_pages
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.support.paging import padding_on_dump_page, pages_of, variant_of, windows_of

STEPS_IN_FLIGHT = 2  # the engine's deepest overlap
BUFFERS = STEPS_IN_FLIGHT + 1  # of each kind: one per queued step, and one that is being filled


class FlashInferAttention:
    """An ``AttentionBackend`` that waits for the device only if more than ``STEPS_IN_FLIGHT`` steps are queued."""

    def __init__(self, setup: Setup, lists: StagingRing, prefill_backend: str, phases: tuple[str, ...]) -> None:
        """Make the planners.

        phases: 'prefill', 'decode' or both; a wrapper needs memory, and its kernels may have to be compiled."""
        self._setup = setup
        self._lists = lists
        self._decode: list[WrapperPlanner] = []
        self._prefill: list[WrapperPlanner] = []
        for window in windows_of(setup.spec):
            if "decode" in phases:
                self._decode.append(DecodeRows(setup, window))
            if "prefill" in phases:
                self._prefill.append(PrefillSegments(setup, window, prefill_backend))
        self._pages = pages_of(setup.pool)
        self._num_decodes = 0
        self._graph_pages: Tensor | None = None

    def plan_step(self, batch: AttentionBatch) -> None:
        """Plan the decode rows and the prefill segments."""
        count = self._num_decodes = batch.num_decodes
        table_BP = padding_on_dump_page(batch, self._setup.pool)
        lengths, query_lengths = batch.host_lengths, batch.host_query_lengths
        if count:
            self._plan(table_BP[:count], lengths[:count], query_lengths[:count], self._decode)
        if count < len(lengths):
            self._plan(table_BP[count:], lengths[count:], query_lengths[count:], self._prefill)

    def _plan(self, table_BP: Tensor, lengths: Int32, query_lengths: Int32, planners: list[WrapperPlanner]) -> None:
        host = HostLists(self._lists, lengths, query_lengths, self._setup.pool.page_size)
        starts_and_last = host.starts_and_last.to(table_BP.device, non_blocking=True)
        pages_I1 = table_BP.new_empty(host.num_pages + 1)
        gather_pages(table_BP, starts_and_last[: len(lengths) + 1], pages_I1)
        for planner in planners:
            planner.plan(host, pages_I1[:-1], query_lengths)
        host.staging.sent()

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        # Allocated here: the library would fill prefill results with zeros first, in every layer.
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        self.attend_into(layer, q_TNH, out_TNH)
        return out_TNH

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Write one layer's result to out_TNH."""
        variant = variant_of(self._setup.spec, layer)
        if count := self._num_decodes:
            self._decode[variant].run(q_TNH[:count], self._pages[layer], out_TNH[:count])
        if count < len(q_TNH):
            self._prefill[variant].run(q_TNH[count:], self._pages[layer], out_TNH[count:])

    def for_graph(self, batch: AttentionBatch) -> AttentionBackend:
        """Return a backend for one graph of these rows.  ``attend`` runs once before its capture.

        Graphs run one at a time, so one list of pages serves all; the largest graph should be built first."""
        num_entries = batch.page_table_BP.numel() + 1
        if self._graph_pages is None or len(self._graph_pages) < num_entries:
            pool = self._setup.pool
            self._graph_pages = torch.full((num_entries,), pool.dump_page, dtype=torch.int32, device=pool.data.device)
        return GraphAttention(self._setup, self._lists, batch, self._graph_pages[:num_entries])


class GraphAttention(FlashInferAttention):
    """The backend of one graph.  All memory that its kernels read stays where it was at the capture.

    The graph itself makes the lists from the step's tables and lengths; the host does nothing as long as every row has
    as many pages as in the previous plan."""

    def __init__(self, setup: Setup, lists: StagingRing, batch: AttentionBatch, pages_I1: Tensor) -> None:
        """Make the planners, with lists in pages_I1: int32, with room for every page of every row and one more."""
        super().__init__(setup, lists, prefill_backend="", phases=())
        num_rows, max_pages = batch.page_table_BP.shape
        self._num_decodes = num_rows
        self._batch = batch
        self._device_lists = DeviceLists(num_rows, max_pages, setup.pool, pages_I1)
        self._graph_rows = [GraphRows(setup, window, self._device_lists) for window in windows_of(setup.spec)]
        self._decode = [*self._graph_rows]
        self._planned: Int32 | None = None
        self._begun = False

    def plan_step(self, batch: AttentionBatch) -> None:
        """Plan again if the numbers of pages have changed."""
        lengths, page_size = batch.host_lengths, self._setup.pool.page_size
        assert len(lengths) == self._num_decodes, f"{len(lengths)} rows, captured for {self._num_decodes}"
        counts = (lengths + (page_size - 1)) // page_size
        if self._planned is not None and np.array_equal(counts, self._planned):
            return
        assert int(counts.max()) <= self._device_lists.max_pages, (
            f"{int(counts.max())} pages of a row, captured for {self._device_lists.max_pages}"
        )
        stale = [rows for rows in self._graph_rows if self._planned is None or rows.splits]
        self._planned = None  # a plan that fails may be incomplete
        if stale:
            host = HostLists(self._lists, lengths, batch.host_query_lengths, page_size)
            for rows in stale:
                rows.plan(host, self._device_lists.pages_I1[: host.num_pages], batch.host_query_lengths)
            host.staging.sent()
        self._planned = counts

    def begin_step(self) -> None:
        """Fill the lists, before the layers: FlashInfer's kernels read them before they wait for preceding work."""
        self._device_lists.fill(self._batch.page_table_BP, self._batch.lengths_B)
        self._begun = True

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Write one layer's result to out_TNH.  In a trial, without ``begin_step``, the first layer fills the lists."""
        if layer == 0 and not self._begun:
            self.begin_step()
        self._begun = False
        super().attend_into(layer, q_TNH, out_TNH)
