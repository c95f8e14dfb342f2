"""The mode of graphs that a device gets, and the operations that plugins named in time keep out of graphs."""

import msgspec
import pytest
import torch

from engine.graphs.breakable import SegmentRecorder
from engine.graphs.device import HostDevice
from engine.graphs.rank import RankGraphs, choose_mode
from engine.plugins import manager
from engine.plugins.comm.local import LocalComm
from engine.settings.sections import GraphsSection
from engine.types.errors import ConfigError
from tests.graphs.engines import install
from tests.graphs.runners import Steps, load, tokens
from tests.models.checkpoints import build, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(
    ("setting", "captures", "mode"),
    [
        ("auto", True, "breakable"),
        ("auto", False, "off"),
        ("off", True, "off"),
        ("decode", True, "decode"),
        ("compiled", True, "compiled"),
        ("compiled", False, "compiled"),
    ],
)
def test_modes(setting, captures, mode):
    assert choose_mode(setting, captures) == mode


@pytest.mark.parametrize("setting", ["decode", "breakable"])
def test_captures_without_a_gpu_are_refused(setting):
    with pytest.raises(ConfigError, match=rf"graphs.mode={setting}: captures need an NVIDIA GPU"):
        choose_mode(setting, False)


def test_nothing_is_built_where_graphs_are_off():
    comm = LocalComm()
    graphs = RankGraphs(GraphsSection(), torch.device("cpu"), comm)
    graphs.break_at(["acme::route"])
    assert isinstance(graphs.device, HostDevice)
    assert graphs.comm is comm
    assert graphs.measure(None, None) == 0
    assert graphs.piecewise(None, None, False) is graphs.decode(None, None, False) is None


@pytest.mark.parametrize(("mode", "pieces", "whole"), [("decode", False, True), ("breakable", True, True)])
def test_each_mode_captures_its_steps(checkpoint, monkeypatch, mode, pieces, whole):
    devices = install(monkeypatch)
    runner = load(checkpoint, mode, max_running=2)
    assert (runner.parts.whole_decodes is not None) == whole
    steps = Steps(runner)
    devices[0].replays.clear()
    tokens(steps.prefill(0, 9))
    assert bool(devices[0].replays) == pieces
    devices[0].replays.clear()
    tokens(steps.decode(0))
    assert devices[0].replays == [1, 1]  # up to the logits, and the sampler


def declare(monkeypatch, operation):
    """Let the backend that is served declare an operation as one that graphs leave out."""
    checked = manager.checked

    def declaring(info, declaration):
        found = checked(info, declaration)
        if info.name == "attention.torch":
            found = msgspec.structs.replace(found, graph_breaks=(operation,))
        return found

    monkeypatch.setattr(manager, "checked", declaring)


def test_operations_of_a_backend_that_auto_chooses_are_known_before_captures(checkpoint, monkeypatch):
    install(monkeypatch)
    declare(monkeypatch, "acme::route")
    named, used, record = [], [], SegmentRecorder.record
    monkeypatch.setattr(
        SegmentRecorder, "record", lambda self, size, run: (used.append(self), record(self, size, run))[1]
    )
    break_at = RankGraphs.break_at
    monkeypatch.setattr(
        RankGraphs, "break_at", lambda self, names: (named.append(tuple(names)), break_at(self, names))[1]
    )
    load(checkpoint, "decode", max_running=1, attention="auto")
    assert named == [("acme::route",)]
    assert {recorder.named for recorder in used} == {("acme::route",)}


def test_an_engine_is_split_at_what_its_plugins_name(checkpoint, monkeypatch):
    install(monkeypatch)
    declare(monkeypatch, "aten::index_copy_")
    breaks, record = [], SegmentRecorder.record

    def watched(self, size, run):
        recording = record(self, size, run)
        breaks.append(recording.breaks)
        return recording

    monkeypatch.setattr(SegmentRecorder, "record", watched)
    load(checkpoint, "breakable", max_running=1)
    assert all(one["aten::index_copy_"] for one in breaks)


def test_passes_without_pieces_are_refused():
    with pytest.raises(ConfigError, match=r"graphs.mode is 'off' here; set graphs.mode=compiled"):
        RankGraphs(GraphsSection(), torch.device("cpu"), LocalComm(), [("graph_pass.casts", lambda piece: None)])
