"""Runs ``tests/attention/interpreted``: the triton backend's kernels on the CPU, in Triton's interpreter.

Whether a kernel is interpreted is decided when triton is imported, so each module takes a process of its own; they run
side by side.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not published for this system")

INTERPRETED = Path(__file__).with_name("interpreted")
MODULES = sorted(path.name for path in INTERPRETED.glob("test_*.py"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running() -> Iterator[Mapping[str, subprocess.Popen[str]]]:
    # Of no use to them, and two seconds each: what other packages add to pytest.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    processes = {
        module: subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED / module)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for module in MODULES
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("module", MODULES)
def test_in_the_interpreter(running: Mapping[str, subprocess.Popen[str]], module: str) -> None:
    output, _ = running[module].communicate(timeout=600)
    assert running[module].returncode == 0, output[-6000:]
