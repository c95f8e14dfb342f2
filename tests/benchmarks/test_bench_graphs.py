"""``benchmarks/bench_graphs.py`` from end to end on recording devices, its processes in this one."""

import io
import json
import subprocess
from contextlib import redirect_stdout
from typing import Any

import bench_graphs
import pytest
import torch
from gpu_sections.captures import WAYS
from gpu_sections.shapes import SMALL_QWEN3

from engine.graphs import rank
from engine.graphs.capturing import Capturing
from tests.benchmarks.doubles import install_doubles
from tests.graphs.engines import EngineDevice

pytestmark = pytest.mark.slow


def begin_in_any_order(device: EngineDevice, pool: object, size: int) -> None:
    """Captures that the recording device refuses are what the engine's way is compared with."""
    graphs, device.graphs, device.pools = device.graphs, [], []
    BEGIN(device, pool, size)
    device.graphs = graphs


BEGIN = EngineDevice.begin_capture


def run_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    said = io.StringIO()
    with redirect_stdout(said):
        bench_graphs.main(command[2:])
    return subprocess.CompletedProcess(command, 0, said.getvalue(), "")


def test_every_way_to_capture_is_measured_and_the_engines_own_is_put_back(monkeypatch, tmp_path, capsys):
    install_doubles(monkeypatch)
    monkeypatch.setattr(EngineDevice, "begin_capture", begin_in_any_order)
    monkeypatch.setattr(bench_graphs, "QWEN3_06B", SMALL_QWEN3 | {"num_hidden_layers": 1})
    monkeypatch.setattr(bench_graphs.subprocess, "run", run_here)
    monkeypatch.setitem(bench_graphs.keep.__globals__, "describe_machine", dict)
    output = tmp_path / "rows.json"
    with torch.inference_mode():
        bench_graphs.main(["--device", "cpu", "--max-tokens", "8", "--max-rows", "2", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert [(row["case"], row["what"], row["sizes"]) for row in rows] == [
        (way, what, 2) for way in WAYS for what in ("piecewise", "decode")
    ]
    assert all(row["of_engine_s"] > 0 and row["of_engine_mb"] > 0 for row in rows)
    assert rank.Capturing is Capturing
    assert "piecewise" in capsys.readouterr().out
