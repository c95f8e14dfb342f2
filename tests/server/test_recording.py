"""POST /debug/recording: a file for ``callboard replay``, where there is a folder for it, and for operators alone."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.actors.operations import Operate, Operated
from engine.config import Config, ConfigSource, build_config
from engine.control.system import System
from engine.features.recording.engine import RecordingFeature
from engine.features.recording.file import read_recording
from engine.features.recording.recorder import Recorder
from engine.features.recording.replay import Replay
from engine.types.errors import RequestError
from server.run.operations import LocalOperations
from tests.models.checkpoints import build, save
from tests.server.http_client import ask
from tests.server.live_server import CARD
from tests.server.live_system import MODEL, LiveSystem


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


def settings(checkpoint: Path, **tables: Any) -> Config:
    model = {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"}
    return build_config(Config(), {"model": model, "kv": {"num_pages": 64}, **tables})


@pytest.mark.parametrize("prompts", ["whole", "hashed"])
def test_what_was_served_replays_from_the_file_that_the_answer_names(
    checkpoint: Path, tmp_path: Path, prompts: str
) -> None:
    storage = {"folder": str(tmp_path), "recording_prompts": prompts}
    with LiveSystem(settings(checkpoint, storage=storage)) as live:
        for _ in range(3):
            live.complete([1, 2, 3], max_tokens=6)
        answer = ask(live.port, "POST", "/debug/recording", {})
        assert answer.status == 200
        path = Path(answer.json["file"])
        assert path.parent == tmp_path / "recordings"
        assert path.exists()
    replay = Replay(read_recording(path))
    list(replay)
    assert replay.num_plans >= 18
    assert not replay.fault
    assert replay.digest == replay.recorded_digest


def test_a_file_that_cannot_be_written_is_no_answer(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "recordings").write_text("in the way")
    with LiveSystem(settings(checkpoint, storage={"folder": str(tmp_path)})) as live:
        live.complete([1, 2, 3], max_tokens=6)
        answer = ask(live.port, "POST", "/debug/recording", {})
    assert (answer.status, answer.json["error"]["code"]) == (507, "recording_failed")
    assert answer.json["error"]["message"] == "the recording is not written: File exists"


async def test_a_client_that_leaves_cancels_no_recording() -> None:
    written = Future[str]()
    recorder = cast("Recorder", SimpleNamespace(write=lambda why, name: written, folder=Path()))
    features = {"recording": RecordingFeature(recorder)}
    system = cast("System", SimpleNamespace(config=Config(), max_len=64, features=features))
    operations = LocalOperations(system, cast("ConfigSource", None), CARD)
    asked = asyncio.create_task(operations.operate(Operate(what="feature", feature="recording", text="a")))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not written.cancelled()
    written.set_result("")  # as the recorder's thread does


async def test_an_operation_of_no_feature_is_refused() -> None:
    system = cast("System", SimpleNamespace(config=Config(), max_len=64, features={}))
    operations = LocalOperations(system, cast("ConfigSource", None), CARD)
    with pytest.raises(RequestError, match="no such operation") as refused:
        await operations.operate(Operate(what="feature", feature="recording"))
    assert refused.value.status == 404


async def test_an_operation_that_fails_in_any_way_is_answered() -> None:
    def write(why: str, name: str) -> Future[str]:
        raise OverflowError

    recorder = cast("Recorder", SimpleNamespace(write=write, folder=Path()))
    features = {"recording": RecordingFeature(recorder)}
    system = cast("System", SimpleNamespace(config=Config(), max_len=64, features=features))
    answers: list[Operated] = []
    operations = LocalOperations(system, cast("ConfigSource", None), CARD)
    operations.answer(Operate(what="feature", feature="recording", text="a", number=7), answers.append)
    while not answers:
        await asyncio.sleep(0)
    assert [(one.number, one.status, one.code) for one in answers] == [(7, 500, "internal_error")]


def test_without_a_folder_there_is_none_and_it_says_so(checkpoint: Path) -> None:
    with LiveSystem(settings(checkpoint)) as live:
        answer = ask(live.port, "POST", "/debug/recording", {})
    assert (answer.status, answer.json["error"]["code"]) == (404, "recording_off")
    assert "storage.folder" in answer.json["error"]["message"]


def test_a_web_page_cannot_ask_for_one(checkpoint: Path, tmp_path: Path) -> None:
    with LiveSystem(settings(checkpoint, storage={"folder": str(tmp_path)})) as live:
        headers = {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
        assert ask(live.port, "POST", "/debug/recording", b"", headers).status == 403
    assert not (tmp_path / "recordings").exists()
