"""The table of figures says what the tests measured: worst values, bounds that were missed, failures, skips."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.figures import ROOT

SUITE = """
import pytest
import tests.figures

tests.figures.crowding = lambda: {crowding}

@pytest.mark.parametrize("took", [1, 3, 2])
@pytest.mark.reliability("P10", "killed")
def test_killed(figure, took):
    figure("took", took, "s", at_most={bound}, patience=2)
    figure("left", 10 - took, at_least=7)

@pytest.mark.reliability("P2", "looked at")
@pytest.mark.skipif({skip}, reason="cannot look")
def test_looked_at():
    assert {looks}

def test_of_no_interest():
    raise AssertionError
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "crowding", "bound", "skip", "looks", "code", "verdicts"),
    [
        ("0", 1.0, 3, False, True, 0, ["holds", "holds", "holds"]),
        ("2", 1.0, 2, True, True, 1, ["skipped: cannot look", "MISSED", "holds"]),
        ("0", 2.0, 1, True, True, 1, ["skipped: cannot look", "MISSED", "holds"]),
        ("0", 1.0, 1, False, False, 1, ["FAILED", "FAILED", "FAILED"]),
    ],
    ids=["all well", "missed and skipped, from two processes", "missed on a busy machine", "failed"],
)
def test_the_table(
    tmp_path: Path, processes: str, crowding: float, bound: int, skip: bool, looks: bool, code: int, verdicts: list[str]
) -> None:
    suite, written = tmp_path / "test_suite.py", tmp_path / "figures.json"
    suite.write_text(SUITE.format(crowding=crowding, bound=bound, skip=skip, looks=looks))
    command = [sys.executable, "-m", "pytest", "-p", "tests.figures", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    command += ["-m", "reliability", "--rootdir", str(tmp_path), "--reliability", str(written), "-n", processes]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins take two seconds to load
    ended = subprocess.run(
        [*command, str(suite)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stdout
    looked_at, took, left = json.loads(written.read_text())["rows"]
    assert [row["verdict"] for row in (looked_at, took, left)] == verdicts
    assert (looked_at["id"], looked_at["injected"], "figure" in looked_at) == ("P2", "looked at", False)
    assert (took["id"], took["value"], took["bound"], took["unit"]) == ("P10", 3, f"<= {bound}", "s")
    assert (took["tests"], took["times"], "took" in ended.stdout) == (3, 3, True)
    if code == 0:
        assert (left["value"], left["bound"]) == (7, ">= 7")
