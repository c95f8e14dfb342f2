"""A rank that has failed leaves its group: its graphs first, and within a time that does not depend on the library."""

import logging
import threading

import pytest
import torch

from engine.execution import rank_end
from engine.plugins.comm.local import LocalComm
from engine.startup import loading
from engine.types.errors import ConfigError
from tests.graphs.engines import install
from tests.graphs.runners import Steps, load, tokens
from tests.models.checkpoints import build, save
from tests.pace import far

FAR_S = 60.0


class LikeNccl(LocalComm):
    """Its ``close`` returns once no graph is left that could hold a collective, and never else."""

    def __init__(self, device) -> None:
        self.closed = threading.Event()
        self.released = threading.Event()
        self._device = device

    def close(self) -> None:
        if all(graph.discarded for graph in self._device.graphs):
            self.closed.set()
        else:
            self.released.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def captured(checkpoint, monkeypatch):
    """(runner, its device)"""
    devices = install(monkeypatch)
    made = load(checkpoint, "decode", max_running=1)
    steps = Steps(made)
    tokens(steps.prefill(0, 5))
    tokens(steps.decode(0))
    return made, devices[0]


def test_graphs_go_before_the_communicator(captured, monkeypatch):
    made, device = captured
    made._end._comm = comm = LikeNccl(device)
    held = list(device.graphs)
    assert held
    made.leave()
    assert comm.closed.is_set()
    assert all(graph.discarded for graph in held)


def test_a_library_that_does_not_return_is_left_behind(captured, monkeypatch, caplog):
    made, device = captured
    monkeypatch.setattr(rank_end, "LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(device, "discard", lambda: None)
    made._end._comm = comm = LikeNccl(device)
    leaving = threading.Thread(target=made.leave, daemon=True)
    leaving.start()
    leaving.join(far(FAR_S))
    comm.released.set()
    assert not leaving.is_alive()
    assert any("rank 0 has not left its group after 0.05 s" in message for message in caplog.messages)


def test_what_cannot_be_discarded_does_not_keep_the_rank_in_its_group(captured, monkeypatch, caplog):
    made, device = captured

    def discard():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(device, "discard", discard)
    left = []
    monkeypatch.setattr(made._end._comm, "close", lambda: left.append(True))
    with caplog.at_level(logging.ERROR):
        made.leave()
    assert left
    assert "an illegal memory access" in caplog.text


def test_several_ranks_on_gpus_in_one_process_are_refused_before_anything_is_loaded(checkpoint, monkeypatch):
    monkeypatch.setattr(loading, "choose_device", lambda section, rank: torch.device("cuda", rank))
    monkeypatch.setattr(loading, "_connect", lambda *args: pytest.fail("it went on"))
    said = r"device\.tensor_parallel=2 with placement\.executor=inline: .* set placement\.executor=process"
    with pytest.raises(ConfigError, match=said):
        load(checkpoint, "off", num_ranks=2)
