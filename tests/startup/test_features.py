"""Features of a rank that cannot be loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.features import RankFeature
from engine.plugins.kinds import chosen_plugins
from engine.plugins.manager import Plugins
from engine.startup import features, loading
from engine.startup.features import left_on_failure, rank_features
from tests.models.checkpoints import build, save


class Left(RankFeature):
    """A feature that counts how often it has left."""

    num_left = 0

    def leave(self) -> None:
        self.num_left += 1


def test_features_leave_if_a_later_part_of_the_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Left()

    def fail(context: object) -> RankFeature:
        raise MemoryError

    builders = {"a": lambda context: first, "b": lambda context: None, "c": fail}
    modules = {name: SimpleNamespace(rank_feature=build) for name, build in builders.items()}
    monkeypatch.setattr(features, "feature_modules", lambda half: modules)
    context: Any = None
    with pytest.raises(MemoryError):
        rank_features(context)
    assert first.num_left == 1
    del modules["c"]
    found = rank_features(context)
    with left_on_failure(found):
        pass
    assert (found, first.num_left) == ((first,), 1)
    with pytest.raises(KeyboardInterrupt), left_on_failure(found):
        raise KeyboardInterrupt
    assert first.num_left == 2


def test_a_rank_that_cannot_be_loaded_has_its_features_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = Left()

    def fail(*parts: object) -> None:
        raise MemoryError

    monkeypatch.setattr(loading, "rank_features", lambda context: (first,))
    monkeypatch.setattr(loading, "PoolMaker", fail)
    directory = save(build("qwen3"), tmp_path)
    model = {"path": str(directory), "tokenizer": "none", "max_model_len": 64}
    settings = {"model": model, "device": {"kind": "cpu"}}
    system = System(build_config(Config(), settings))
    plugins = Plugins(chosen_plugins(system.config))
    with pytest.raises(MemoryError):
        loading.load_runner(system.config, system.spec, system.max_len, plugins, rank=0, progress=False)
    assert first.num_left == 1
