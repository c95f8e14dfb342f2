"""Attention that plans each step on the host, in torch, under the name of a library that does: see ``doubles.py``.

A graph's tables and lengths are buffers of its own, written by ``plan_step``; on a GPU each of these is a copy to it.
"""

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.hookspecs import AttentionContext, hookimpl
from tests.graphs.resident import ResidentTorchAttention

CALLBOARD_PLUGIN = {"api": 1}


class PlannedTorchAttention(TorchAttention):
    """num_sent: copies to the device that all of them have made."""

    num_sent = 0

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        super().__init__(spec, pool)
        self._parts = spec, pool

    def for_graph(self, num_rows: int, max_pages: int) -> "GraphRows":
        return GraphRows(*self._parts, num_rows, max_pages)


class GraphRows:
    """Decode rows of one graph."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, num_rows: int, max_pages: int) -> None:
        self._dump_page = pool.dump_page
        self._inner = ResidentTorchAttention(spec, pool)
        self._batch = AttentionBatch(
            num_decodes=num_rows,
            page_table_BP=torch.zeros((num_rows, max_pages), dtype=torch.int32),
            lengths_B=torch.zeros(num_rows, dtype=torch.int32),
            query_starts_B1=torch.arange(num_rows + 1, dtype=torch.int32),
            host_lengths=np.ones(num_rows, dtype=np.int32),
            host_query_lengths=np.ones(num_rows, dtype=np.int32),
        )

    def plan_step(self, batch: AttentionBatch) -> None:
        num, width = batch.page_table_BP.shape
        self._batch.page_table_BP.fill_(self._dump_page)
        self._batch.page_table_BP[:num, :width] = batch.page_table_BP
        self._batch.lengths_B.fill_(1)
        self._batch.lengths_B[:num] = batch.lengths_B
        PlannedTorchAttention.num_sent += 2
        self._inner.plan_step(self._batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        return self._inner.attend(layer, q_TNH)


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    return PlannedTorchAttention
