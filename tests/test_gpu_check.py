"""What ``benchmarks/gpu_check.py`` counts: bytes and operations of kernels, interpreted in the place of a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = [
    *("experts", "four_bits", "four_bit_linears", "kernels", "dependent_launch", "kernel_sampler", "recurrences"),
    *(
        "attention_triton",
        "attention_triton_speed",
        "attention_triton_prompts",
        "attention_shared",
        "attention_latents",
    ),
    "eight_bits",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


# One process for all of them: ``tests/benchmarks/test_bare_machine.py`` runs the command, which gives each its own.
PROGRAM = """
import sys
from pathlib import Path
import torch
from tests import interpreter
interpreter.pytest_configure()
from gpu_check import run_section
for name in sys.argv[2:]:
    run_section(name, torch.device("cpu"), Path(sys.argv[1]) / name)
"""


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """Section -> case -> row."""
    output = tmp_path_factory.mktemp("gpu_check")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(output), *SECTIONS],
        cwd=ROOT,
        env={
            **os.environ,
            **{"TRITON_INTERPRET": "1", "CALLBOARD_KERNELS": "triton", "OMP_NUM_THREADS": "1"},
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks"))),
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: [json.loads(line) for line in (output / name).read_text().splitlines()] for name in SECTIONS}
    assert all(found.values())
    assert not [row for rows in found.values() for row in rows if not row["ok"]]
    return {name: {row["case"]: row for row in rows} for name, rows in found.items()}


def moved_bytes(row: dict[str, Any]) -> float:
    return row["gb_per_s"] * 1e9 * row["us"] / 1e6


@pytest.mark.parametrize(
    "case, expected",
    [
        ("add and norm, bfloat16", (1024 + 1024 + 1024 + 1024) * 2),
        ("add and norm, float32", (1024 + 1024 + 1024 + 1024) * 4),
        ("gated silu, bfloat16", (6144 + 3072) * 2),
        ("angles, float32", 8 + (64 + 64) * 4),
        ("head norm, rotation, store, bfloat16", (32 + 16 + 8 + 8) * 128 * 2 + 128 * 4 + 8),
        ("embedding of one of two ranks, bfloat16", 8 + (1024 // 2 + 1024) * 2),
    ],
)
def test_a_kernels_share_of_the_copy_bandwidth(sections, case, expected):
    row = sections["kernels"][f"{case}, 5 tokens"]
    assert moved_bytes(row) == pytest.approx(5 * expected)
    assert row["of_copy"] == pytest.approx(row["gb_per_s"] / sections["kernels"]["copy"]["gb_per_s"])


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("where", ["no pages: torch, dense", "pages of 16: triton", "pages of 64: triton"])
def test_attention_in_shares_of_the_copy_bandwidth_and_operations(sections, heads, where):
    decodes = sections["attention_triton_speed"]
    row = decodes[f"{heads}/8 heads, 2 rows of 40, {where}"]
    assert moved_bytes(row) == pytest.approx(2 * 40 * 2 * 8 * 128 * 2)
    assert row["of_copy"] == pytest.approx(row["gb_per_s"] / decodes["copy"]["gb_per_s"])
    row = sections["attention_triton_prompts"][f"{heads}/8 heads, 1 prompts of 20, {where}"]
    pairs = sum(range(1, 21))
    assert row["tflops"] * 1e12 * row["us"] / 1e6 == pytest.approx(pairs * heads * 128 * 2 * 2)


def test_top_p_alone_is_a_case_of_its_own_and_what_one_such_row_costs_all_others_too(sections):
    cases = sections["kernel_sampler"]
    for case in ("top_p 0.95 alone", "top_p 0.95 alone, flat logits", "captured, one row of top_p 0.95 alone"):
        assert cases[f"{case}, 2 rows"]["ok"]


def test_ways_of_decoding_are_compared_on_a_cpu(tmp_path):
    """Drafts, float8 and adapters, by engines; none of it needs triton."""
    output = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu", "--output", str(output)]
    command += ["--sections", "drafts", "float8_model", "adapted"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["sections"]
    assert {name: len(found) for name, found in rows.items()} == {"drafts": 4, "float8_model": 4, "adapted": 4}
    assert all(row["tokens_per_s"] > 0 for found in rows.values() for row in found)
