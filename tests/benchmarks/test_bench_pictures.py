"""The benchmark of pictures, small: both ways give the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import far

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_small_run_gives_the_tokens_of_transformers_and_all_ratios(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, str(ROOT / "benchmarks/bench_pictures.py"), "--shapes", "tiny", "--turns", "1"]
    command += ["--tokens", "4", "--output", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=far(60), check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(kept.read_text())["shapes"]["tiny"]
    assert [(row["at_once"], row["wanted"]) for row in rows] == [(1, 1.5), (8, 3.0)]
    assert all(row["same_tokens"] == [True] and row["ratio"] > 0 for row in rows)
