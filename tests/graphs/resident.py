"""Attention without a plan, in torch: what a captured decode step can hold on a CPU."""

import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention


class ResidentTorchAttention:
    """See ``AttentionBackend``.  Decode rows by their whole tables, masked; what has prompts by the torch backend.

    tables: of the last batch of each size."""

    capturable = True

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        self.spec = spec
        self.pool = pool
        self._prompts = TorchAttention(spec, pool)
        self._batch: AttentionBatch | None = None
        self.in_page = torch.arange(pool.page_size)
        self.tables: dict[int, Tensor] = {}

    def plan_step(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self.tables[len(batch.host_lengths)] = batch.page_table_BP
        if batch.num_decodes < len(batch.host_lengths):
            self._prompts.plan_step(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        batch, spec = self._batch, self.spec
        assert batch is not None
        if batch.num_decodes < len(batch.host_lengths):
            return self._prompts.attend(layer, q_TNH)
        table_BP = batch.page_table_BP.to(torch.int64)
        slots_BL = (table_BP[:, :, None] * self.pool.page_size + self.in_page).flatten(1)
        seen_BL = _seen(spec, layer, slots_BL.shape[1], batch.lengths_B)
        shape = (*slots_BL.shape, spec.num_kv_heads, 1, spec.head_size)
        keys, values = (
            slots.index_select(0, slots_BL.flatten()).view(shape).masked_fill(~seen_BL[:, :, None, None, None], 0)
            for slots in (self.pool.keys(layer), self.pool.values(layer))
        )
        q_B1GNH = q_TNH.view(len(slots_BL), 1, spec.num_kv_heads, -1, spec.head_size)
        scores = (q_B1GNH * keys).sum(-1) * spec.scale
        weights = scores.masked_fill(~seen_BL[:, :, None, None], -torch.inf).softmax(1)
        return (weights[..., None] * values).sum(1).view(q_TNH.shape)


def _seen(spec: AttentionSpec, layer: int, num_slots: int, lengths_B: Tensor) -> Tensor:
    position_L = torch.arange(num_slots)
    seen_BL = position_L < lengths_B[:, None]
    if spec.window and layer >= spec.first_window_layer:
        seen_BL &= position_L >= lengths_B[:, None] - spec.window
    return seen_BL
