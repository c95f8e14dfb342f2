"""Where the memory goes: the pool gets what the largest step and the graphs leave, measured before it is allocated."""

import logging

import pytest
import torch

from engine.config import Config, build_config
from engine.errors import ConfigError, GraphError
from engine.execution import memory
from engine.execution.memory import Needs, pool_pages
from engine.graphs.capturing import Capturing
from engine.graphs.decode import DecodeGraphs
from engine.graphs.device import DeviceMemory
from engine.plugins.comm.local import LocalComm
from tests.graphs.engines import install
from tests.graphs.recording import RecordingDevice
from tests.graphs.runners import Steps, load, tokens
from tests.models.checkpoints import build, save

GB = 1_000_000_000


def config(**kv):
    return build_config(
        Config(), {"kv": {"page_size": 16, "memory_fraction": 0.5, **kv}, "scheduler": {"max_running": 8}}
    )


def test_the_pool_gets_its_share_less_what_others_need():
    pages = {needs: pool_pages(config(), 1024, 1_000_000, GB, needs) for needs in (Needs(), Needs(10**8, 5 * 10**7))}
    assert list(pages.values()) == [500, 350]
    assert pool_pages(config(), 64, 1_000_000, GB, Needs()) == 64 // 16 * 8 * 4  # more would serve nobody


def test_a_pool_without_room_for_one_sequence_is_refused_with_what_took_the_room():
    with pytest.raises(
        ConfigError, match=r"room for 0 pages .* after 0\.40 GB for a step, 0\.20 GB for graphs, one seq"
    ):
        pool_pages(config(), 1024, 1_000_000, GB, Needs(4 * 10**8, 2 * 10**8))
    with pytest.raises(ConfigError, match=r"raise it, lower model\.max_len, or set kv.num_pages"):
        pool_pages(config(), 16_000, 1_000_000, GB, Needs())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def test_an_engine_measures_before_it_allocates_and_says_so(checkpoint, monkeypatch, caplog):
    devices = install(monkeypatch)
    seen = []
    monkeypatch.setattr("engine.execution.loading.free_bytes", lambda device: 10 * GB)
    monkeypatch.setattr(
        "engine.execution.loading.pool_pages", lambda *args: (seen.append(args[-1]), pool_pages(*args))[1]
    )
    monkeypatch.setattr(RecordingDevice, "peak", lambda self, run: (run(), 7)[1])
    with caplog.at_level(logging.INFO):
        runner = load(checkpoint, "breakable", max_running=2, num_pages=0)
    assert seen[0].activation_bytes == 7
    steps = Steps(runner)
    for row in range(2):
        steps.prefill(row, 9)
    tokens(steps.decode(0, 1))
    (line,) = [one.getMessage() for one in caplog.records if " memory: " in one.getMessage()]
    assert f"KV pool {runner._pool.data.nbytes / 1e9:.2f} GB ({runner.num_pages} pages, {4 * runner.num_pages}" in line
    # Trial captures have a pool of their own, and nothing is left of them.
    (device,) = devices
    assert [bool(graphs) for graphs in device.dropped] == [True]
    assert device.trims


class Shrinking(RecordingDevice):
    """Every capture takes a tenth of what is free to begin with, and less if one was there before."""

    def __init__(self):
        super().__init__()
        self.free = 1000

    def end(self):
        self.free -= 100 if not self.graphs else 8
        return super().end()

    def memory(self):
        return DeviceMemory(self.free, 0)


def test_all_graphs_are_counted_from_the_two_largest():
    device = Shrinking()
    runs = []

    def record(size):
        device.begin(None, size)
        device.end()

    trial = Capturing(device, LocalComm(), torch.device("cpu"))
    assert trial.measure((1, 2, 4, 8), runs.append, record, lambda: runs.append("forgotten"), advice="") == 100 + 3 * 8
    assert runs == [8, 4, "forgotten"]
    assert [graph.size for graph in device.graphs] == [8, 4]


def test_a_trial_that_fails_turns_graphs_off_or_is_an_error(checkpoint, monkeypatch, caplog):
    install(monkeypatch)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecodeGraphs, "_run", fail)
    with pytest.raises(GraphError, match=r"a trial capture failed .*out of memory.*lower graphs.max_rows"):
        load(checkpoint, "decode", num_pages=0)
    runner = load(checkpoint, "auto", num_pages=0)
    assert runner._decode_graphs is None
    assert "graphs are off: a trial capture failed" in caplog.text


def test_a_step_without_room_is_refused_at_start(checkpoint, monkeypatch):
    install(monkeypatch)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.execution.loading.run_largest_step", fail)
    with pytest.raises(ConfigError, match=r"scheduler\.max_step_tokens=32: no room for a step of that size"):
        load(checkpoint, "breakable", num_pages=0)


def test_the_largest_step_has_as_many_tokens_and_rows_as_there_may_be(checkpoint, monkeypatch):
    install(monkeypatch)
    seen = []
    sample = memory.Sampler.sample

    def watching(self, logits_NV, rows_N, *rest):
        seen.append((tuple(logits_NV.shape[:1]), rows_N.tolist()))
        return sample(self, logits_NV, rows_N, *rest)

    monkeypatch.setattr(memory.Sampler, "sample", watching)
    load(checkpoint, "off", num_pages=0)
    assert seen == [((8,), list(range(8)))]
