"""Runs the modules of ``tests/kernels/interpreted`` with Triton's interpreter, which stands in for a GPU.

Triton decides when it is imported whether it interprets, so each module gets a process, and this one may import triton
as it likes.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = [path.stem for path in sorted((HERE / "interpreted").glob("test_*.py"))]
TIMEOUT_S = 600  # forty seconds on a machine that has nothing else to do


def run(module: str) -> subprocess.CompletedProcess[str]:
    # Small tensors: a second thread only costs.  So does what other packages add to pytest, two seconds each time.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    path = HERE.relative_to(ROOT) / "interpreted" / f"{module}.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, "Future[subprocess.CompletedProcess[str]]"]]:
    """Two at a time: one of them takes as long as all the others together.  It goes first."""
    with ThreadPoolExecutor(2) as pool:
        yield {module: pool.submit(run, module) for module in sorted(MODULES, key=lambda one: one != "test_sampler")}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("module", MODULES)
def test_in_the_interpreter(runs, module):
    done = runs[module].result()
    assert done.returncode == 0, done.stdout + done.stderr
