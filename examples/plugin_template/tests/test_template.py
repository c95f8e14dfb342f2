"""The plugins by callboard's conformance kit, and what they add."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from callboard_template.aged_lfu import AgedLFU
from callboard_template.patches import callboard_encoder
from callboard_template.watched import WatchedAttention, callboard_attention_backend
from safetensors.torch import save_file

from callboard.plugins import (
    AttentionBackend,
    AttentionContext,
    AttentionSpec,
    EncoderContext,
    KVPool,
    PluginError,
    WeightsError,
    attention_factory,
)
from callboard.plugins.testing import (
    ConformanceError,
    Declaration,
    attention_cases,
    check_attention_backend,
    check_encoder,
    check_eviction_strategy,
    through_hook,
)

CONTEXT = AttentionContext("cpu", "float32", page_size=16, num_heads=4, num_kv_heads=2, head_size=64)
DECLARES = Declaration(api=1, head_sizes=(64,), page_sizes=(1, 16))
TORCH = attention_factory("torch", CONTEXT)


def test_aged_lfu_is_a_strategy() -> None:
    check_eviction_strategy(lambda: AgedLFU(1000))


@pytest.mark.parametrize("every", [1, 3])
def test_watched_attention_is_a_backend(every: int) -> None:
    check_attention_backend(through_hook(callboard_attention_backend, {"every": every}), DECLARES)


def test_calls_are_counted_and_every_so_many_compared() -> None:
    made: list[WatchedAttention] = []

    def factory(spec: AttentionSpec, pool: KVPool) -> WatchedAttention:
        made.append(WatchedAttention(TORCH(spec, pool), spec, pool, every=2))
        return made[-1]

    check_attention_backend(factory, DECLARES)
    assert len(made) == len(attention_cases(DECLARES))
    assert all(one.num_compared == (one.num_calls + 1) // 2 > 0 for one in made)


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_wrong_backend_is_noticed(factor: float) -> None:
    def wrong(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        backend = TORCH(spec, pool)
        right = backend.attend
        backend.attend = lambda layer, q_TNH: right(layer, q_TNH) * factor
        return WatchedAttention(backend, spec, pool, 1)

    with pytest.raises(ConformanceError) as found:
        check_attention_backend(wrong, DECLARES)
    assert all("ValueError: layer 0, sequence 0" in reason for reason in found.value.failures.values())


@pytest.mark.parametrize("backend", ["auto", "watched", "nonsense"])
def test_it_needs_to_know_whom_to_watch(backend: str) -> None:
    with pytest.raises(PluginError, match=backend):
        callboard_attention_backend(replace(CONTEXT, options={"backend": backend}))


def test_patches_are_an_encoder(tmp_path: Path) -> None:
    context = EncoderContext(tmp_path, {}, {"sides": 3, "pixels": 2})
    with pytest.raises(WeightsError, match=r"patches\.safetensors"):
        callboard_encoder(context)
    save_file({"projection": torch.randn(32, 12)}, tmp_path / "patches.safetensors")
    for dtype in ("float32", "bfloat16"):
        check_encoder(lambda: callboard_encoder(context), dtype)
    with pytest.raises(WeightsError, match=r"has the shape \(32, 12\)"):
        callboard_encoder(replace(context, options={"pixels": 3})).tower("cpu", "float32")
