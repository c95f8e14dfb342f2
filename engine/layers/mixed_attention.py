"""Attention of a model whose layers differ in their heads: a backend for each kind of layer.

Legend: T new tokens in the step (ragged, packed) · N query heads · H head size of a layer
Owns: which backend a layer has.  Does not know: kernels, how a backend is chosen.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionFactory,
    AttentionSpec,
    BeginningAttention,
    GraphAttentionBuilder,
    is_capturable,
    writer_of,
)
from engine.layers.kv_pool import KVPool
from engine.layers.mixed_pool import MixedPool


def build_attention(factory: AttentionFactory, spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    """Return the backend that the factory builds, or one for each kind of layer behind one."""
    if not isinstance(pool, MixedPool):
        return factory(spec, pool)
    kinds = spec.kinds
    backends = [factory(one, pool.part(layers)) for layers, one in kinds]
    return MixedAttention(backends, [layers for layers, _ in kinds])


class MixedAttention:
    """An ``AttentionBackend`` of several.  layers: numbers of the layers that each computes, in its own order."""

    def __init__(self, backends: Sequence[AttentionBackend], layers: Sequence[Sequence[int]]) -> None:
        self._backends = backends
        self._layers = layers
        self._of = {
            layer: (backend, writer_of(backend), index)
            for backend, own in zip(backends, layers, strict=True)
            for index, layer in enumerate(own)
        }
        self.capturable = all(is_capturable(one) for one in backends)
        if any(isinstance(one, GraphAttentionBuilder) for one in backends):
            self.for_graph = self._for_graph

    def plan_step(self, batch: AttentionBatch) -> None:
        """Let each backend prepare the step."""
        for one in self._backends:
            one.plan_step(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Attend in one layer, as ``AttentionBackend.attend``."""
        backend, _, index = self._of[layer]
        return backend.attend(index, q_TNH)

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Attend in one layer and write the result to a tensor, as ``WritingAttention.attend_into``."""
        _, write, index = self._of[layer]
        write(index, q_TNH, out_TNH)

    def begin_step(self) -> None:
        """Let each backend queue its work for all layers, as ``BeginningAttention.begin_step``."""
        for one in self._backends:
            if isinstance(one, BeginningAttention):
                one.begin_step()

    def _for_graph(self, batch: AttentionBatch) -> "MixedAttention":
        """Return a backend for one graph, as ``GraphAttentionBuilder.for_graph``."""
        own = [one.for_graph(batch) if isinstance(one, GraphAttentionBuilder) else one for one in self._backends]
        return MixedAttention(own, self._layers)
