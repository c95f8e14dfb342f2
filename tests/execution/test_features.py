"""The seam of optional parts of a rank: their order in a step, what a step without them costs, what they add to it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import engine.features
from engine.execution.features import RankFeature, hooks
from engine.execution.launched_step import LaunchedStep
from engine.execution.runner import ModelRunner
from engine.features.host_tier.rank import HostTierRank
from engine.features.kv_store.rank import StoreRank
from engine.features.speculation.rank import DraftRank
from engine.messages import FeatureAnswer, FeatureRequest, Step
from engine.startup import features as finder
from tests.graphs.runners import Steps, load
from tests.models.checkpoints import build, save

REQUEST = FeatureRequest(feature="store", number=3, body=b"")


class Noting(RankFeature):
    """Notes what it is called with, and adds a column to the results of steps."""

    def __init__(self, name: str, order: int, said: list[str]) -> None:
        self.order = order
        self._name = name
        self._said = said

    def begin(self, step: Step) -> None:
        self._said.append(f"{self._name} begins")

    def apply(self, step: Step) -> Step:
        self._said.append(f"{self._name} applies {len(step.parts)}")
        return msgspec.structs.replace(step, parts={})

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        launched.parts["name"] = self._name.encode

    def receive(self, message: FeatureRequest, answer: Any) -> bool:
        answer(FeatureAnswer(rank=0, feature="store", number=self.order, body=b""))
        return self.order > 1

    def close(self) -> None:
        self._said.append(f"{self._name} closes")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def with_features(checkpoint: Path, features: Sequence[RankFeature]) -> ModelRunner:
    return ModelRunner(**{**vars(load(checkpoint, "off").parts), "features": tuple(features)})


def test_features_take_a_step_in_their_order_and_what_they_add_is_in_its_result(checkpoint: Path) -> None:
    said: list[str] = []
    runner = with_features(checkpoint, [Noting("first", 1, said), Noting("second", 2, said)])
    steps = Steps(runner)
    steps.prefill(0, 5)
    assert said == ["first begins", "second begins", "first applies 0", "second applies 0"]
    said.clear()
    step = Step(step_id=1, decode_rows=np.array([0], np.int32).tobytes(), parts={"one": b"", "two": b""})
    done = runner.launch(step).collect()
    assert said[2:] == ["first applies 2", "second applies 0"], "a feature gets the step as the one before it left it"
    assert done.parts == {"name": b"second"}
    runner.close()
    assert said[-2:] == ["first closes", "second closes"]


def test_a_message_goes_to_the_feature_that_takes_it(checkpoint: Path) -> None:
    answers: list[Any] = []
    runner = with_features(checkpoint, [Noting("first", 1, []), Noting("second", 2, []), Noting("third", 3, [])])
    runner.receive(REQUEST, answers.append)
    assert [one.number for one in answers] == [1, 2], "the third is not asked"
    with pytest.raises(AssertionError, match="no feature of rank 0 takes a request of store"):
        with_features(checkpoint, []).receive(REQUEST, answers.append)


def test_a_hook_that_no_feature_has_is_not_called() -> None:
    class Silent(RankFeature):
        """Overrides nothing."""

    noting = Noting("one", 1, [])
    assert hooks([Silent(), noting], "apply") == (noting.apply,)
    assert not any(hooks([Silent(), Silent()], name) for name in ("begin", "apply", "launched"))


def test_pages_move_before_they_are_read() -> None:
    """A landing may go into a page that left for the host in the same step; a head reads states that came back."""
    assert HostTierRank.order < StoreRank.order < DraftRank.order


def test_a_folder_without_a_rank_half_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in {
        "later": "from engine.execution.features import RankFeature\n"
        "class Later(RankFeature):\n    order = 7\n"
        "def rank_feature(context):\n    return Later()\n",
        "sooner": "from engine.execution.features import RankFeature\n"
        "def rank_feature(context):\n    return RankFeature() if context else None\n",
    }.items():
        (tmp_path / "features" / name).mkdir(parents=True)
        (tmp_path / "features" / name / "__init__.py").touch()
        (tmp_path / "features" / name / "rank.py").write_text(source)
    (tmp_path / "features" / "none").mkdir()
    (tmp_path / "features" / "none" / "__init__.py").touch()
    monkeypatch.setattr(engine, "__path__", [str(tmp_path)])
    monkeypatch.setattr(engine.features, "__path__", [str(tmp_path / "features")])
    context: Any = {"config": None}
    assert [one.order for one in finder.rank_features(context)] == [0, 7]
    nothing: Any = {}
    assert [one.order for one in finder.rank_features(nothing)] == [7]
    for name in ("sooner", "later", "none"):
        for module in (f"engine.features.{name}", f"engine.features.{name}.rank"):
            sys.modules.pop(module, None)
