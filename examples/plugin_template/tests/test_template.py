"""Both plugins by callboard's conformance kit, and what they add."""

import pytest
import torch
from callboard_template.aged_lfu import AgedLFU
from callboard_template.watched import WatchedAttention, callboard_attention_backend
from torch import Tensor

from engine.errors import PluginError
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.declaration import Declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.testing.attention import check_attention_backend, through_hook
from engine.plugins.testing.attention_cases import attention_cases
from engine.plugins.testing.eviction import check_eviction_strategy
from engine.plugins.testing.findings import ConformanceError

DECLARES = Declaration(api=1, head_sizes=(64,), page_sizes=(1, 16))


def test_aged_lfu_is_a_strategy() -> None:
    check_eviction_strategy(lambda: AgedLFU(1000))


@pytest.mark.parametrize("every", [1, 3])
def test_watched_attention_is_a_backend(every: int) -> None:
    check_attention_backend(through_hook(callboard_attention_backend, {"every": every}), DECLARES)


def test_calls_are_counted_and_every_so_many_compared() -> None:
    made: list[WatchedAttention] = []

    def factory(spec: AttentionSpec, pool: KVPool) -> WatchedAttention:
        made.append(WatchedAttention(TorchAttention(spec, pool), spec, pool, every=2))
        return made[-1]

    check_attention_backend(factory, DECLARES)
    assert len(made) == len(attention_cases(DECLARES))
    assert all(one.num_compared == (one.num_calls + 1) // 2 > 0 for one in made)


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_wrong_backend_is_noticed(factor: float) -> None:
    class Wrong(TorchAttention):
        def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
            return super().attend(layer, q_TNH) * torch.tensor(factor, dtype=q_TNH.dtype)

    with pytest.raises(ConformanceError) as found:
        check_attention_backend(lambda spec, pool: WatchedAttention(Wrong(spec, pool), spec, pool, 1), DECLARES)
    assert all("ValueError: layer 0, sequence 0" in reason for reason in found.value.failures.values())


@pytest.mark.parametrize("backend", ["auto", "watched", "nonsense"])
def test_it_needs_to_know_whom_to_watch(backend: str) -> None:
    with pytest.raises(PluginError, match=backend):
        callboard_attention_backend(AttentionContext("cpu", "float32", 16, 4, 2, 64, options={"backend": backend}))
