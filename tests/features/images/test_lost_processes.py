"""Processes of an encoder that are lost while they load, or whose answers cannot be read."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import numpy as np
import pytest
import torch

from engine.config import Config
from engine.features.images import tower_process
from engine.features.images.encoder_main import Encoded, EncoderTicket, receive, send, serve
from engine.features.images.tower_process import TowerProcess
from engine.host.logs import LogSettings
from engine.plugins.encoder import choice
from engine.plugins.encoder.encoder import ToEncode
from engine.types.errors import WeightsError
from tests.workers.executors import alive, children, within

FILES = [np.arange(size, dtype=np.float32).tobytes() for size in (2, 5, 3)]


class Started:
    """Encoders whose processes do what their words are, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "script"
        self.all: list[TowerProcess] = []

    def __call__(self, words: str) -> TowerProcess:
        self.script.write_text(words)
        ticket = EncoderTicket(Config(), str(self.script), "cpu", "float32", 1, LogSettings.here(), os.getpid())
        self.all.append(TowerProcess(ticket, torch.device("cpu"), torch.float32, 0.0))
        return self.all[-1]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setattr(tower_process, "MODULE", "tests.features.images.fake_encoder")
    made = Started(tmp_path)
    yield made
    for one in made.all:
        one.close()


def encoded(tower: TowerProcess, data: bytes) -> bytes:
    return tower.encode(data, "").numpy().tobytes()


def test_a_process_that_dies_in_its_first_load_is_started_again_then_and_with_the_next_picture(
    started: Started,
) -> None:
    tower = started("dies serves")
    assert not started.script.read_text(), "it waited for a picture"
    assert encoded(tower, FILES[0]) == FILES[0]
    tower = started("dies dies dies dies serves")
    assert started.script.read_text() == "dies serves"
    assert encoded(tower, FILES[0]) == FILES[0]
    with pytest.raises(WeightsError, match="no weights"):
        started("dies refuses serves")


def test_a_picture_after_one_whose_answer_could_not_be_read_has_its_own_rows(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = started("serves serves babbles serves")
    read, is_full = tower_process.read_exactly, True

    def read_once(stream: IO[bytes], num_bytes: int) -> bytes:
        nonlocal is_full
        if is_full:
            is_full = False
            raise MemoryError
        return read(stream, num_bytes)

    monkeypatch.setattr(tower_process, "read_exactly", read_once)
    assert [encoded(tower, data) for data in FILES] == FILES
    (pid,) = children(role="fake_encoder")
    os.kill(pid, 9)
    assert [encoded(tower, data) for data in FILES] == FILES
    assert not started.script.read_text()


def test_a_picture_pays_for_the_deaths_alone_that_it_may_have_caused(started: Started) -> None:
    tower = started("serves " * 20)
    for number in range(5):  # of a process that has no picture
        (pid,) = children(role="fake_encoder")
        os.kill(pid, 9)
        if number % 2:
            within(2.0, lambda pid=pid: not alive(pid))
        assert encoded(tower, FILES[0]) == FILES[0]
    good, bad = ToEncode(FILES[1], ""), ToEncode(b"ends", "")
    for batch in ([good, bad], [bad, good], [good, bad, good]):
        found = tower.encode_each(batch)
        for picture, rows in zip(batch, found, strict=True):
            if picture is bad:
                assert str(rows) == "3 processes of the encoder ended with this picture"
            else:
                assert isinstance(rows, torch.Tensor)
                assert rows.numpy().tobytes() == FILES[1]


def test_processes_that_die_before_they_have_a_picture_are_bounded(started: Started) -> None:
    tower = started("serves dies dies dies serves")
    (pid,) = children(role="fake_encoder")
    os.kill(pid, 9)
    within(2.0, lambda: not alive(pid))
    with pytest.raises(RuntimeError, match="3 processes of the encoder ended before they had this picture"):
        tower.encode(FILES[0], "")
    assert encoded(tower, FILES[0]) == FILES[0]


def test_an_encoder_that_is_closed_while_it_loads_ends_at_once(started: Started) -> None:
    tower = started("dies dies dies waits serves")
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            tower.encode(FILES[0], "")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    within(10.0, lambda: started.script.read_text() == "serves")
    tower.close()
    thread.join(10.0)
    assert [str(one) for one in errors] == ["the encoder is closed with this picture"]
    assert started.script.read_text() == "serves"


def answers_of(tower: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoded]:
    """Return what the process of an encoder with this tower writes about one picture."""
    encoder: Any = SimpleNamespace(tower=tower)
    monkeypatch.setattr(choice, "chosen_encoder", lambda config, directory: encoder)
    stream, answers = BytesIO(), BytesIO()
    send(stream, msgspec.msgpack.encode([ToEncode(b"abc", "")]))
    stream.seek(0)
    threads = torch.get_num_threads()
    with suppress(EOFError):
        serve(EncoderTicket(Config(), "", "cpu", "float32", threads, LogSettings.here(), os.getpid()), stream, answers)
    answers.seek(0)
    while answers.tell() < len(answers.getvalue()):
        yield msgspec.msgpack.decode(receive(answers), type=Encoded)


def test_rows_of_another_dtype_are_an_error_of_their_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(data: bytes, way: str) -> torch.Tensor:
        return torch.ones(1, len(data), 2, dtype=torch.bfloat16)

    first, second = answers_of(lambda device, dtype: SimpleNamespace(encode=encode), monkeypatch)
    assert not first.reason
    assert (second.num_bytes, second.status) == (0, 500)


def test_an_encoder_that_cannot_be_loaded_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def tower(device: str, dtype: str) -> Any:
        raise ImportError("no such tower")

    (answer,) = answers_of(tower, monkeypatch)
    assert answer.reason == "ImportError: no such tower"
