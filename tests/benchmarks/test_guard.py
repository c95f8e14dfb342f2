"""A section of ``benchmarks/gpu_check.py`` that fails, hangs or dies is a row, and the others run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gpu_check
import torch
from gpu_sections import sampler
from gpu_sections.table import LIMIT_S, SECTIONS
from gpu_sections.warm_up import warm_up

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


def test_what_fails_while_compilers_warm_up_is_left_to_its_own_section(monkeypatch):
    monkeypatch.setattr(sampler, "sampler", failing)
    rows = list(warm_up(CPU, ["sampler", "nccl"]))
    assert [row["case"] for row in rows] == ["sampler: RuntimeError: no such kernel", "nccl: 1 rows"]
    assert all(row["ok"] for row in rows)


def test_compilers_have_longer_than_what_is_timed():
    assert next(iter(SECTIONS)) == "warm_up"
    longer = {name for name, section in SECTIONS.items() if section.limit_s > LIMIT_S}
    assert longer == {"warm_up", "graph_tokens_compiled", "attention_race", "flashinfer_fp8", "invariance"}
