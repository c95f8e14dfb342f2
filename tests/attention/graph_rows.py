"""Decode rows as a graph has them: tables and lengths that the captured step writes, behind all planning.

Owns: the static batch, the order in which things happen.  Does not know: backends, captures.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    BeginningAttention,
    GraphAttentionBuilder,
    is_capturable,
)
from engine.layers.kv_pool import KVPool


class GraphRows:
    """A backend in a graph of ``num_rows``; steps may have fewer, the rest is padding."""

    def __init__(self, backend: AttentionBackend, pool: KVPool, num_rows: int, max_pages: int) -> None:
        ones = np.ones(num_rows, dtype=np.int32)
        self._dump_page = pool.dump_page
        self.batch = AttentionBatch(
            num_decodes=num_rows,
            page_table_BP=torch.full((num_rows, max_pages), pool.dump_page, dtype=torch.int32),
            lengths_B=torch.ones(num_rows, dtype=torch.int32),
            query_starts_B1=torch.arange(num_rows + 1, dtype=torch.int32),
            host_lengths=ones,
            host_query_lengths=ones,
        )
        self.plans = not is_capturable(backend)
        if self.plans:
            assert isinstance(backend, GraphAttentionBuilder)
            backend = backend.for_graph(self.batch)
        self.backend = backend
        backend.plan_step(self.batch)

    def plan_step(self, batch: AttentionBatch) -> None:
        """What the host does before a replay, and then what the graph does in front of its first layer."""
        num, table_BP = len(batch.host_lengths), batch.page_table_BP[:, : self.batch.page_table_BP.shape[1]]
        lengths = np.ones_like(self.batch.host_lengths)
        lengths[:num] = batch.host_lengths
        if self.plans:
            self.backend.plan_step(replace(self.batch, host_lengths=lengths))
        self.batch.page_table_BP[num:] = self._dump_page
        self.batch.page_table_BP[:num, : table_BP.shape[1]] = table_BP
        self.batch.lengths_B.copy_(torch.from_numpy(lengths))

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """See ``AttentionBackend.attend``."""
        if not layer and isinstance(self.backend, BeginningAttention):
            self.backend.begin_step()
        return self.backend.attend(layer, q_TNH)
