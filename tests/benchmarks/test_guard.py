"""A section of ``benchmarks/gpu_check.py`` that fails, hangs or dies is a row, and the others run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import gpu_check
import pytest
import torch
from gpu_sections import sampler
from gpu_sections.table import LIMIT_S, SECTIONS
from gpu_sections.warm_up import warm_up

from tests.benchmarks.conftest import BENCHMARKS

CPU = torch.device("cpu")


def failing(device: torch.device) -> Iterator[dict[str, Any]]:
    yield {"case": "first", "ok": True}
    raise RuntimeError("no such kernel")


def test_the_rows_before_a_failure_are_kept_and_it_is_one_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(sampler, "sampler", failing)
    gpu_check.run_section("sampler", CPU, tmp_path / "rows")
    first, last = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert first == {"case": "first", "ok": True}
    assert not last["ok"]
    assert last["problem"] == "RuntimeError: no such kernel"


def test_a_section_that_takes_too_long_or_dies_is_a_row(monkeypatch):
    (row,) = gpu_check.guarded("sampler", CPU, 0.01)
    assert row == {"case": "(section)", "ok": False, "problem": "not done in 0.01 s"}
    run = subprocess.run
    monkeypatch.setattr(
        gpu_check.subprocess, "run", lambda command, **kwargs: run([sys.executable, "-c", "exit(7)"], **kwargs)
    )
    (row,) = gpu_check.guarded("sampler", CPU, 60.0)
    assert row["problem"] == "its process ended with exit code 7"


LATE = """
import sys, time
import gpu_check
from gpu_sections import sampler

def slow_sampler(device):
    time.sleep(3)
    yield {"case": "late", "ok": True}

sampler.sampler = slow_sampler
sys.argv += ["--device", "cpu", "--sections", "sampler", "--timeout", "1"]
gpu_check.main()
"""


def test_a_section_that_is_late_says_where_it_is(tmp_path):
    path = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent)))
    command = [sys.executable, "-c", LATE, "--rows-file", str(tmp_path / "rows")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert "in slow_sampler" in done.stderr
    assert json.loads((tmp_path / "rows").read_text()) == {"case": "late", "ok": True}


@pytest.mark.parametrize("together, most", [(1, 1), (2, 2)])
def test_sections_that_only_check_run_side_by_side_if_asked_to_and_others_alone(together, most, monkeypatch):
    running: list[str] = []
    beside: dict[str, int] = {}

    def guarded(name: str, device: torch.device, timeout_s: float) -> list[dict[str, Any]]:
        running.append(name)
        time.sleep(0.2)
        beside[name] = len(running)
        running.remove(name)
        return [{"case": name, "ok": True}]

    monkeypatch.setattr(gpu_check, "guarded", guarded)
    names = ["sampler", "greedy", "stored_pages", "nccl"]
    found = dict(gpu_check.at_once(names, CPU, 9.0, together))
    assert found == {name: [{"case": name, "ok": True}] for name in names}
    assert (beside["sampler"], beside["nccl"]) == (1, 1)
    assert max(beside["greedy"], beside["stored_pages"]) == most


def test_what_fails_while_compilers_warm_up_is_left_to_its_own_section(monkeypatch):
    monkeypatch.setattr(sampler, "sampler", failing)
    rows = list(warm_up(CPU, ["sampler", "nccl"]))
    assert [row["case"] for row in rows] == ["sampler: RuntimeError: no such kernel", "nccl: 1 rows"]
    assert all(row["ok"] for row in rows)


def test_compilers_have_longer_than_what_is_timed():
    assert next(iter(SECTIONS)) == "warm_up"
    longer = {name for name, section in SECTIONS.items() if section.limit_s > LIMIT_S}
    assert longer == {"warm_up", "graph_tokens_compiled", "attention_race", "flashinfer_fp8", "invariance"} | {
        "recurrences",
        "hybrid_speed",
        "families",  # sixty checkpoints, each by two engines
    }
