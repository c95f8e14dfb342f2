"""Every kernel compiles for a GPU that is not here, and none of them spills registers to memory."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

KERNELS = {
    "add_norm_round_row", "add_norm_rows", "adjust_tokens", "advance_chunks", "advance_head", "choose_for_token",
    "convolve_tile", "count_block", "down_pairs", "draw_candidate", "expand_outputs", "fill_row", "gate_columns",
    "gate_groups", "gate_pairs", "gate_round_groups", "gather_rows", "list_candidates", "list_row",
    "measure_some_blocks", "multiply_coded_tiles", "multiply_rows", "multiply_tiles", "narrow_row", "pick_row",
    "place_block", "place_pairs", "prepare_chunk", "reduce_inputs", "rotate_heads", "round_row", "sum_norm_rows",
    "tabulate_angles", "weigh_candidates", "widen_tile", "write_places",
}  # fmt: skip

TILED = {
    "down_pairs",
    "reduce_inputs",
    "gate_pairs",
    "multiply_coded_tiles",
    "multiply_tiles",
}  # which read several tiles ahead
OF_HOPPER = {"advance_chunks"}  # which reads a chunk ahead there, and none elsewhere

# Launched while the kernel in front of them still runs: whether they read weights before they wait for it, and whether
# they let the next one begin as early.  What makes lists of pages does not: libraries read those before they wait.
WAITING = {
    "add_norm_round_row": (True, True), "add_norm_rows": (True, True), "advance_chunks": (True, True),
    "advance_head": (True, True), "convolve_tile": (False, True), "expand_outputs": (True, True),
    "fill_row": (False, False), "gate_columns": (False, True), "gate_groups": (False, True),
    "gate_round_groups": (False, True), "gather_rows": (False, True), "list_row": (False, False),
    "multiply_rows": (True, True), "prepare_chunk": (True, True), "reduce_inputs": (True, True),
    "rotate_heads": (True, True), "round_row": (False, True), "sum_norm_rows": (True, True),
    "tabulate_angles": (False, True), "write_places": (False, False),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.kernels.compile_kernels", "bfloat16"],
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(compiled: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in compiled} == KERNELS
    for row in compiled:
        assert row.get("spilled", 0) == 0, row
        # Sine and cosine of a large angle keep its digits in an array, which some versions put there.
        assert row.get("stack", 0) == 0 or row["kernel"] == "tabulate_angles", row
        # What a program gets on every GPU, and what Ampere and later ones give to a program that asks for more.
        most = 227 if row["kernel"] in OF_HOPPER or row["float8"] else 96 if row["kernel"] in TILED else 48
        assert row["shared"] <= most << 10, row


def test_experts_in_float8_are_multiplied_by_tensor_cores_of_hopper(compiled: list[dict[str, Any]]) -> None:
    for name in ("gate_pairs", "down_pairs"):
        assert sum(row["kernel"] == name and row["float8"] > 0 for row in compiled) == 2, "both sizes for many pairs"


def test_products_have_one_variant_for_every_number_of_rows(compiled: list[dict[str, Any]]) -> None:
    assert sum(row["kernel"] == "multiply_tiles" for row in compiled) == 3, "one for each weight"


def test_kernels_that_begin_early_wait_for_what_they_read_and_before_they_write(compiled: list[dict[str, Any]]) -> None:
    early = [row for row in compiled if row["early"]]
    assert {row["kernel"] for row in early} == WAITING.keys()
    for row in early:
        reads_weights, lets_next = WAITING[row["kernel"]]
        assert row["waits"] == 1, row
        assert (row["lets_next"], row["lets_next_before"]) == (int(lets_next), 0), row
        assert row["written_before"] == 0, row
        assert reads_weights or row["read_before"] == 0, row
    assert all(row["waits"] == 0 for row in compiled if not row["early"])
    assert any(row["read_before"] for row in early)
