"""The KV pool of a rank with features: their pages, needs and samples are counted before it is allocated."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.execution.features import RankFeature
from engine.execution.needs import Needs
from engine.layers.attention import AttentionBackend
from engine.layers.kv_pool import KVPool
from engine.startup import loading, memory, pools
from engine.types.errors import ConfigError
from tests.graphs.engines import install
from tests.graphs.runners import load
from tests.models.checkpoints import build, save

PAGE_BYTES = 3 * 2 * 4 * 2 * 32 * 4  # 3 layers x keys and values x 4 tokens x 2 heads x 32 numbers of 4 bytes


class Hungry(RankFeature):
    """Takes as much memory for each page as the KV pool does, and as much as 10 of both besides."""

    page_bytes = PAGE_BYTES
    more_samples = 3

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.built: list[tuple[KVPool, list[KVPool], Needs]] = []

    def needs(self, needs: Needs) -> Needs:
        return replace(needs, feature_bytes=(*needs.feature_bytes, ("hunger", 20 * PAGE_BYTES)))

    def prepare(self, num_pages: int) -> None:
        self.prepared.append(num_pages)

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        assert self.prepared[-1], "attention is built when the feature's pool is there"
        return backend

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        self.built.append((pool, list(pools), needs))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def hungry(monkeypatch: pytest.MonkeyPatch) -> Hungry:
    feature = Hungry()
    monkeypatch.setattr(loading, "rank_features", lambda context: (feature,))
    return feature


def test_a_feature_has_its_share_of_the_pages_and_its_needs_are_named(
    checkpoint: Path, hungry: Hungry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "host_needs", lambda *_: Needs())
    room = 2 * 100 * PAGE_BYTES + 20 * PAGE_BYTES
    monkeypatch.setattr(pools, "free_bytes", lambda device: int(room / memory.MAX_HOST_SHARE))
    with pytest.raises(ConfigError, match=r"for hunger; lower it to \d+ or less"):
        load(checkpoint, "off", num_pages=130)
    runner = load(checkpoint, "off", num_pages=100)
    ((pool, others, needs),) = hungry.built
    assert (runner.num_pages, pool.num_pages, others) == (100, 100, [])
    assert needs.feature_bytes == (("hunger", 20 * PAGE_BYTES),)


def test_what_was_measured_with_is_freed_before_the_pool_is_sized(
    checkpoint: Path, hungry: Hungry, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    seen: list[Any] = []
    run_largest_step = pools.run_largest_step
    monkeypatch.setattr(pools, "run_largest_step", lambda *args: (seen.append(args[-1]), run_largest_step(*args)))
    monkeypatch.setattr(pools, "free_bytes", lambda device: (seen.append(list(hungry.prepared)), 1 << 30)[1])
    runner = load(checkpoint, "breakable", num_pages=0)
    assert seen == [3, [1, 0]], "rows are sampled at as many positions as a feature says"
    assert hungry.prepared == [1, 0, runner.num_pages]
