"""Traces of steps: where they are written, who may ask for them, and that no request notices."""

import gzip
import json
from pathlib import Path

import pytest

from engine.config import Config, build_config
from engine.settings.sections import ServerSection
from tests.models.checkpoints import build, save
from tests.server.http_client import ask
from tests.server.live_server import LiveServer
from tests.server.live_system import MODEL, LiveSystem
from tests.server.test_administration import bearer

TEXT = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("callboard-*-rank0.json.gz"), key=lambda path: path.name.split("-")[3])


def test_steps_are_recorded_until_there_are_enough_or_somebody_says_so(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    settings = {
        "model": {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"},
        "kv": {"num_pages": 64},
        "server": {"profile_folder": str(folder)},
    }
    with LiveSystem(build_config(Config(), settings)) as live:
        quiet = live.complete([1, 2, 3], max_tokens=6).json["choices"]
        assert ask(live.port, "POST", "/start_profile", {"num_steps": 3}).json["num_steps"] == 3
        assert live.complete([1, 2, 3], max_tokens=6).json["choices"] == quiet
        assert live.wait_until(lambda _: len(traces(folder)) == 1, 20)

        assert ask(live.port, "POST", "/start_profile", b"", TEXT).json == {"folder": str(folder), "num_steps": 1000}
        live.complete([1, 2, 3], max_tokens=2)
        assert ask(live.port, "POST", "/start_profile", {}).status == 200  # writes the one before
        assert live.wait_until(lambda _: len(traces(folder)) == 2, 20)
        live.complete([1, 2, 3], max_tokens=2)
        for _ in range(2):  # the second one finds nothing to write
            assert ask(live.port, "POST", "/stop_profile", b"", TEXT).json["num_steps"] == 0
        assert live.wait_until(lambda _: len(traces(folder)) == 3, 20)
        live.complete([1, 2, 3], max_tokens=2)
    assert len(list(folder.iterdir())) == 3
    for path, num_steps in zip(traces(folder), (3, 2, 2), strict=True):
        names = [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        assert len([name for name in names if name.startswith("callboard::step ")]) == num_steps


def test_a_folder_that_cannot_be_written_costs_no_request(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    settings = {
        "model": {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"},
        "kv": {"num_pages": 64},
        "server": {"profile_folder": str(tmp_path / "file")},
    }
    with LiveSystem(build_config(Config(), settings)) as live:
        ask(live.port, "POST", "/start_profile", {"num_steps": 1})
        assert live.complete([1, 2, 3], max_tokens=3).status == 200
        assert live.wait_until(lambda _: "no profile was written" in caplog.text, 20)
        assert live.complete([1, 2, 3], max_tokens=3).status == 200


def test_who_may_ask_and_for_what(tmp_path: Path) -> None:
    with LiveServer() as live:
        assert ask(live.port, "POST", "/start_profile", {}).error["code"] == "profiles_off"
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients]\nteam = "theirs----------"\n[operators]\nme = "mine------------"\n')
    with LiveServer(server=ServerSection(key_file=str(keys), profile_folder=str(tmp_path))) as live:
        for path in ("/start_profile", "/stop_profile"):
            assert ask(live.port, "POST", path, {}).status == 401
            assert ask(live.port, "POST", path, {}, bearer("theirs----------")).error["code"] == "operators_only"
            assert ask(live.port, "POST", path, {}, bearer("mine------------")).status == 200
        for wrong in ({"num_steps": 0}, {"num_steps": 1001}, {"num_steps": "x"}):
            assert (
                ask(live.port, "POST", "/start_profile", wrong, bearer("mine------------")).error["param"]
                == "num_steps"
            )
        foreign = bearer("mine------------") | TEXT | {"Sec-Fetch-Site": "cross-site"}
        assert ask(live.port, "POST", "/stop_profile", b"", foreign).error["code"] == "foreign_page"
    assert [(ask.num_steps, ask.folder) for ask in live.monitor.profiles] == [(1000, str(tmp_path)), (0, str(tmp_path))]
