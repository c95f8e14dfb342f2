"""Attention that plans each step on the host, in torch, under the name of a library that does: see ``doubles.py``.

A plan depends on how many pages each row has; on a GPU it is a copy.
"""

from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.hookspecs import AttentionContext, hookimpl
from tests.graphs.resident import ResidentTorchAttention

CALLBOARD_PLUGIN = {"api": 1}


class PlannedTorchAttention(TorchAttention):
    """num_sent: plans that all of them have sent to the device."""

    num_sent = 0

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        super().__init__(spec, pool)
        self._parts = spec, pool

    def for_graph(self, batch: AttentionBatch) -> "GraphRows":
        return GraphRows(*self._parts, batch)


class GraphRows:
    """Decode rows of one graph, over the tables and lengths that the step writes."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, batch: AttentionBatch) -> None:
        self._page_size = pool.page_size
        self._inner = ResidentTorchAttention(spec, pool)
        self._inner.plan_step(batch)
        self._planned: list[int] = []

    def plan_step(self, batch: AttentionBatch) -> None:
        counts = (-(-batch.host_lengths // self._page_size)).tolist()
        PlannedTorchAttention.num_sent += counts != self._planned
        self._planned = counts

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        return self._inner.attend(layer, q_TNH)


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    return PlannedTorchAttention
