"""The triton backend's kernels, compiled for an H200 without one: they fit, spill nothing, and load ahead of their use.

A few shapes; ``python -m tests.attention.compile_triton --candidates`` has the others.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not published for this system")

from engine.plugins.attention.triton.tiles import decode_bytes, default_decode, default_prefill, padded
from tests.attention.recorded_launches import H200, KERNELS, SHARED_KERNELS

pytestmark = pytest.mark.slow

NUM_CASES = 5
# A launch merges the parts of the third.  The last but one has the same bits in every step, and the last one has rows
# enough to share pages.
MERGING = ["decode_attention", "prefill_attention"]
LAUNCHED = [*MERGING * 2, *KERNELS, "prefill_attention", *SHARED_KERNELS, *MERGING]
READING = ("decode_attention", "prefill_attention", "shared_attention")
SPILLED_BYTES = 16  # a register or two more or less, by the compiler's version, is no harm
REGISTERS = 64 << 10  # of one processor


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if platform.machine() not in ("x86_64", "AMD64", "aarch64") or sys.platform != "linux":
        pytest.skip("triton brings NVIDIA's assembler for Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.attention.compile_triton", "--cases", str(NUM_CASES)]
    ran = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_every_kernel_compiles_and_spills_nothing(compiled: list[dict[str, Any]]) -> None:
    assert [row["kernel"] for row in compiled] == LAUNCHED
    assert max(row["spilled"] for row in compiled) <= SPILLED_BYTES


def test_every_kernel_waits_for_the_one_before_it_and_lets_the_next_one_begin(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        assert row["early"], row
        assert (row["waits"], row["lets_next"], row["lets_next_before"]) == (1, 1, 0), row
        assert row["read_before"] == row["written_before"] == 0, row


def test_keys_and_values_come_in_pieces_of_16_bytes(compiled: list[dict[str, Any]]) -> None:
    # Float8 that becomes bfloat16 on its way into registers comes in pieces of 8 as well, by the compiler's choice.
    reading = [row for row in compiled if row["kernel"] in READING and not row["kv_dtype"]]
    assert all(row["wide"] > 0 and row["narrow"] == 0 for row in reading)


def test_decode_programs_run_side_by_side_with_tiles_on_their_way(compiled: list[dict[str, Any]]) -> None:
    """A load that is not started ahead takes no shared memory, and each tile then waits for memory."""
    for row in compiled:
        if row["kernel"] == "decode_attention":
            tiles = default_decode(row["head_size"], 2, H200, converted=bool(row["kv_dtype"]))
            element_bytes = 1 if row["kv_dtype"] else 2
            under_way = 2 * (tiles.num_stages - 1) * tiles.block_keys * padded(row["head_size"]) * element_bytes
            assert under_way <= row["shared"] <= decode_bytes(tiles, row["head_size"], 2) + 4096
            assert tiles.programs * row["shared"] <= H200.shared_bytes
            assert tiles.programs * 32 * row["warps"] * row["regs"] <= REGISTERS


def test_prefill_has_every_stage_in_shared_memory(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        if row["kernel"] in ("prefill_attention", "shared_attention"):
            tiles = default_prefill(row["head_size"], 2, H200)
            element_bytes = 1 if row["kv_dtype"] else 2
            stages = 2 * (tiles.num_stages - 1) * tiles.block_keys * padded(row["head_size"]) * element_bytes
            assert stages < row["shared"] <= H200.shared_bytes
