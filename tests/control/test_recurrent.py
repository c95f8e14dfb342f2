"""A model with recurrent layers is refused with every setting that would not work with its states."""

from pathlib import Path
from typing import Any

import pytest

from callboard import LLM
from engine.config import Config, build_config
from engine.control import recurrent
from engine.control.engine_spec import engine_spec
from engine.host.device_defaults import with_device_defaults
from engine.host.stages import Stages
from engine.types.errors import ConfigError, PluginError
from server.extensions.doctor.doctor import examine
from tests.models.checkpoints import build, save

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graphs": ({"graphs": {"mode": "compiled"}}, "graphs.mode=compiled: no compiler takes recurrent"),
    "pages": ({"kv": {"page_size": 1}, "plugins": {"proposer": "ngram"}}, "kv.page_size=1: plugins.proposer=ngram"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("lfm2"), tmp_path_factory.mktemp("lfm2"))


@pytest.mark.parametrize("what", REFUSED)
def test_a_setting_that_does_not_work_with_states_is_refused(what: str, checkpoint: Path) -> None:
    changes, said = REFUSED[what]
    config: dict[str, Any] = {"kv": {}, **changes}
    config["model"] = {"tokenizer": "none"} | config.get("model", {})
    with pytest.raises((ConfigError, PluginError), match=said):
        LLM(checkpoint, progress=False, config=config)


def test_the_doctor_says_what_states_take_and_what_a_start_refuses(checkpoint: Path) -> None:
    sections: dict[str, Any] = {"model": {"path": str(checkpoint), "tokenizer": "none"}, "server": {"port": 0}}
    for changes, verdict in (({}, "good"), (REFUSED["graphs"][0], "bad")):
        found = {one.what: one for one in examine(build_config(Config(), {**sections, **changes}))}
        assert found["recurrent states"].verdict == verdict
        assert "of 64 running requests and as much" in found["recurrent states"].found
        assert "GB; more snapshots come with the pages" in found["recurrent states"].found


@pytest.mark.parametrize(
    ("state_bytes", "proposer", "rows"),
    [(1 << 20, "none", 64), (1 << 26, "none", 16), (1 << 26, "ngram", 10), (1 << 40, "none", 1)],
)
def test_states_of_the_rows_that_a_device_chooses_take_a_quarter_of_memory(
    state_bytes: int, proposer: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "available_bytes", lambda: 7 << 30)
    monkeypatch.setattr(recurrent, "resident_bytes", lambda process: 1 << 30)
    sections = {"device": {"kind": "cpu"}, "plugins": {"proposer": proposer}}
    config = with_device_defaults(build_config(Config(), sections))
    fitted = recurrent.with_rows_for_states(config, state_bytes)
    assert fitted.scheduler.max_running == rows


def test_rows_that_a_user_chose_stay(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "available_bytes", lambda: 0)
    monkeypatch.setattr(recurrent, "resident_bytes", lambda process: 1)
    for given, found in ((48, 48), (0, 1)):
        sections = {"model": {"path": str(checkpoint), "tokenizer": "none"}, "scheduler": {"max_running": given}}
        spec = engine_spec(build_config(Config(), sections), Stages())
        assert spec.blueprint.limits.max_running == spec.config.scheduler.max_running == found


def test_states_that_do_not_fit_are_refused_with_the_number_that_does(checkpoint: Path) -> None:
    config = {"model": {"tokenizer": "none"}, "scheduler": {"max_running": 4096}, "kv": {"num_pages": 8}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.startup.loading.fair_share", lambda *_: 1 << 20)
        patch.setattr("engine.startup.loading.check_weights", lambda *_: None)
        with pytest.raises(ConfigError, match=r"scheduler.max_running=4096: the states .* set it to \d+ or less"):
            LLM(checkpoint, progress=False, config={**config, "placement": {"executor": "inline"}})


def test_a_change_of_settings_keeps_the_rows_where_memory_gives_about_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "resident_bytes", lambda process: 0)
    config = with_device_defaults(build_config(Config(), {"device": {"kind": "cpu"}}))
    found = []
    for memory, weights, present in ((8 << 30, 0, 0), (7 << 30, 0, 16), (4 << 30, 0, 16), (8 << 30, 6 << 30, 0)):
        monkeypatch.setattr(recurrent, "available_bytes", lambda memory=memory: memory)
        fitted = recurrent.with_rows_for_states(config, 1 << 26, weights, present)
        found.append(fitted.scheduler.max_running)
    assert found == [16, 16, 8, 4]
