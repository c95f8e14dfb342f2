"""SIGKILL of everything under a batch and background responses, as ``benchmarks/bench_batches.py`` does it."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_batches.py"


@pytest.mark.parametrize("num_kills", [2])
def test_every_line_has_one_answer_and_it_is_the_undisturbed_one(
    tmp_path: Path, num_kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # of what the script imports beside it
    spec = importlib.util.spec_from_file_location("bench_batches", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    for num_tokens in (32, 128, 512):  # more if the lines were over before anybody had looked
        found = bench.undisturbed_and_killed(tmp_path / f"{num_tokens}", 60, 4, num_kills, num_tokens)
        assert found["differing"] == []
        assert found["missing"] == []
        assert found["statuses"] == {"200": 58, "404": 2}
        if found["lines_done_at_kills"][0] < 60:
            return
    pytest.fail("every line was over before the first kill")
