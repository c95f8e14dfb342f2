"""Every section of ``benchmarks/gpu_check.py`` from end to end in its small size, on the doubles of a GPU.

So a section fails on a GPU for what it checks, and not for its own mistakes.
"""

import json
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_sections import graphs
from gpu_sections.shapes import SMALL_QWEN3
from gpu_sections.stepping import Stepping, checkpoint, load, pages_each
from gpu_sections.table import PIECE_S, SECTIONS, STARTS_S, pieces
from gpu_sections.trace import Span, idle_gap_s, num_copies_in, traced

from engine.execution.runner import ModelRunner
from tests.benchmarks.doubles import install_doubles
from tests.own_cache import use_own_cache

pytestmark = pytest.mark.slow

Row = dict[str, Any]
RowsOf = Callable[[str], list[Row]]
CPU = torch.device("cpu")
# Triton's kernels have their interpreter, in processes of their own: ``tests/test_gpu_check.py``.
NO_DOUBLE = {
    *("attention_triton", "attention_triton_speed", "attention_triton_prompts", "attention_triton_tuning"),
    *("experts", "four_bits", "four_bit_linears", "kernels", "kernel_sampler", "dependent_launch", "linears", "nccl"),
    *("recurrences", "attention_shared", "attention_latents", "eight_bits", "summed_norms"),
    "families",  # processes of their own, over checkpoints that ``tests/models/answers.py`` writes
}
LIMIT_S = 300  # a few seconds where nothing else runs


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """What hangs fails, and the others are still tried."""

    def out_of_time(*_: object) -> None:
        raise TimeoutError(f"not done in {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_limits_of_each_piece_add_up_to_less_than_a_command_may_take() -> None:
    shares = pieces(list(SECTIONS))
    assert [name for share in shares for name in share] == list(SECTIONS)
    for share in shares:
        assert sum(SECTIONS[name].limit_s + STARTS_S for name in share) + STARTS_S <= PIECE_S == 600


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RowsOf:
    """A section's rows, on the doubles."""
    install_doubles(monkeypatch)

    def run(name: str) -> list[Row]:
        if name == "attention_race":
            use_own_cache(monkeypatch, tmp_path / "cache")  # it keeps what it finds
        gpu_check.run_section(name, CPU, tmp_path / "rows")
        return [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]

    return run


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "graph_decodes"])
def test_a_section_gives_rows_and_all_are_ok(rows_of, name):
    rows = rows_of(name)
    assert rows
    assert not [row for row in rows if not row["ok"]]
    skipped = [row for row in rows if row.get("problem", "").startswith("skipped")]
    if name == "invariance":  # what it asks of both kinds of kernels, of which one has a double
        assert [row["case"] for row in skipped] == ["triton: kit"]
    else:
        assert skipped == (rows if name in NO_DOUBLE else [])


def test_decode_steps_of_both_kinds_of_attention_with_one_runner_at_a_time(rows_of, monkeypatch):
    """Free of copies where nothing is planned, counted where something is."""
    alive = weakref.WeakSet[ModelRunner]()
    alive_at_load = []

    def load_one(*arguments: Any) -> ModelRunner:
        alive_at_load.append(len(alive))
        runner = load(*arguments)
        alive.add(runner)
        return runner

    monkeypatch.setattr(graphs, "load", load_one)
    rows = rows_of("graph_decodes")
    assert not [row for row in rows if not row["ok"]]
    assert [row["case"] for row in rows if "copies" in row["case"]] == [
        "triton, decode, 0 copies to the device in 4 steady steps (attention plans nothing)",
        "flashinfer, decode, 0 copies to the device in 4 steady steps (attention is prepared for each)",
    ]
    assert alive_at_load == [0, 0, 0, 0]
    assert not alive


def test_a_copy_of_a_backend_that_plans_nothing_is_a_failure(rows_of, monkeypatch):
    monkeypatch.setattr(graphs, "num_copies_in", lambda spans: 1)
    failed = [row["case"] for row in rows_of("graph_decodes_14b") if not row["ok"]]
    assert failed == ["triton, decode, 1 copies to the device in 4 steady steps (attention plans nothing)"]


def test_a_pool_that_is_a_page_a_row_too_small_is_refused(rows_of, monkeypatch):
    monkeypatch.setattr(graphs, "pages_each", lambda *sizes: pages_each(*sizes) - 1)
    problems = [row["problem"] for row in rows_of("graph_decodes_14b") if not row["ok"]]
    assert problems == ["ValueError: row 0 would have page 3 of a pool of 3: load a larger pool"]


def test_the_pages_of_every_batch_are_in_the_pool():
    """At full size: 256 rows of 512 tokens."""
    num_rows, context, room = 256, 512, graphs.ROOM * 32
    with checkpoint(SMALL_QWEN3 | {"max_position_embeddings": 1024}) as path:
        runner = load(path, CPU, num_rows, num_rows * pages_each(context, room), 256, "off", "torch")
        Stepping(runner, 1, context, room, graphs.GREEDY)
        with pytest.raises(ValueError, match="of a pool of"):
            Stepping(runner, num_rows + 1, context, room, graphs.GREEDY)


def test_what_a_profiler_saw_of_copies_and_of_idle_time():
    spans = traced(lambda: torch.ones(1).add(1), CPU)
    assert any(span.name == "aten::add" for span in spans)
    kernels = [Span(10.0 * step, 10.0 * step + 4.0, "kernel") for step in range(5)]
    assert idle_gap_s(kernels, 5) == pytest.approx(6e-6)
    assert num_copies_in([*kernels, Span(1.0, 2.0, "Memcpy HtoD (Pinned -> Device)")]) == 1
