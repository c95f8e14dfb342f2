"""An encoder in a process: it gives the same rows, and what ends it costs no stream a token."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.config import Config
from engine.features.images import tower_process
from engine.features.images.encoder_main import EncoderTicket
from engine.features.images.tower_process import TowerProcess
from engine.host.logs import LogSettings
from engine.plugins.encoder.choice import chosen_encoder
from engine.text.turns import read_turn
from engine.types.errors import RequestError
from tests.features.images import made
from tests.features.images.served import checkpoint, engine, message, params
from tests.workers.executors import alive, children, within

pytestmark = pytest.mark.slow
NAME = "llava"
PATIENCE_S = 6.0  # a busy machine takes longer than the few milliseconds of a picture
KILLS = [4, pytest.param(20, marks=pytest.mark.long)]
PROMPTS = [[7 + number, *range(20, 40)] for number in range(16)]


def encoders() -> list[int]:
    return children(role="encoder")


@pytest.fixture
def process(folder: Path) -> Iterator[TowerProcess]:
    """The process of a tiny encoder, with so much patience for a picture."""
    ticket = EncoderTicket(
        Config(),
        str(checkpoint(NAME, folder)),
        "cpu",
        "float32",
        torch.get_num_threads(),
        LogSettings.here(),
        os.getpid(),
    )
    tower = TowerProcess(ticket, torch.device("cpu"), torch.float32, PATIENCE_S)
    yield tower
    (pid,) = encoders() or (0,)
    tower.close()
    within(2.0, lambda: not pid or not alive(pid))


def test_a_process_gives_the_rows_that_a_thread_gives_and_is_replaced_when_it_is_lost(
    process: TowerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = chosen_encoder(Config(), checkpoint(NAME, folder))
    assert encoder is not None
    data = made.picture(50, 31)
    expected = encoder.tower("cpu", "float32").encode(data, "")
    assert torch.equal(process.encode(data, ""), expected)  # products of oneDNN, with the same shapes and threads
    with pytest.raises(RequestError, match="a picture cannot be read"):
        process.encode(b"no picture", "")
    (pid,) = encoders()
    os.kill(pid, signal.SIGSTOP)
    assert torch.equal(process.encode(data, ""), expected)
    assert not alive(pid)
    os.kill(*encoders(), signal.SIGKILL)
    monkeypatch.setattr(tower_process, "MODULE", "this")  # it writes no answer
    with pytest.raises(RuntimeError, match="3 processes of the encoder ended before they had this picture"):
        process.encode(data, "")
    monkeypatch.undo()
    assert torch.equal(process.encode(data, ""), expected)


class Killer(threading.Thread):
    """A thread that kills two encoders: one that may be at work, and the one that is loaded after it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.num_kills = 0
        self._random = random.Random(seed)
        self._is_over = threading.Event()

    def run(self) -> None:
        killed: list[int] = []
        # One that was lost without work is started again by the next picture.
        while len(killed) < 2 and not self._is_over.wait(0.01):
            if found := [pid for pid in encoders() if pid not in killed]:
                self._kill(*found, 0.3 if killed else 0.05)
                killed = [*killed, *found]

    def _kill(self, pid: int, within_s: float) -> None:
        time.sleep(self._random.uniform(0, within_s))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.num_kills += 1

    def end(self) -> int:
        """Return how many it has killed."""
        self._is_over.set()
        self.join()
        return self.num_kills


@pytest.mark.parametrize("most", KILLS)
def test_an_encoder_that_is_killed_again_and_again_costs_no_stream_a_token(most: int, folder: Path) -> None:
    directory = checkpoint(NAME, folder)
    options = [params(100)] * len(PROMPTS) + [params(16)] * 2
    num_kills, seen = 0, set()
    with engine(directory) as undisturbed, engine(directory, placement={"encoder": "process"}) as llm:
        for number in range(14):
            pictures = ((read_turn(message([(60, 40, 2 * number + one)])),) for one in range(2))
            prompts = [*PROMPTS, *pictures]
            expected = [one.token_ids for one in undisturbed._run_batch(prompts, options, False)]
            seen.add(tuple(expected[-1]))
            killer = Killer(number)
            killer.start()
            assert [one.token_ids for one in llm._run_batch(prompts, options, False)] == expected
            if (num_kills := num_kills + killer.end()) >= most:
                break
    assert len(seen) > 1, "a picture changes nothing"
    assert num_kills >= most
    within(2.0, lambda: not encoders())
