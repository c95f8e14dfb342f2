"""Runs a folder of tests that need Triton's interpreter.

Whether kernels are interpreted is decided when triton is imported, so they take another process than the one that runs
other tests: one for a whole folder, since importing torch and transformers takes longer than most of its modules.

Owns: that process, and what it says about each module.  Does not know: what is tested.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900  # a minute on a machine that has nothing else to do


@dataclass
class Interpreted:
    """What came out.  passed: tests per module.  bad: modules of which a test did not pass."""

    code: int
    output: str
    passed: dict[str, int]
    bad: set[str]

    def check(self, module: str) -> None:
        """Raises AssertionError unless tests of the module ran and all passed."""
        assert module not in self.bad, self.output[-6000:]
        assert self.passed.get(module), self.output[-6000:]
        assert self.code == 0 or self.bad, self.output[-6000:]  # it died, or nothing could be collected


def interpret(folder: Path, report: Path) -> Interpreted:
    """Run the folder's tests in the interpreter.  report: where to write what each test gave."""
    # Small tensors: a second thread only costs.  So does what other packages add to pytest, two seconds each time.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["no:cacheprovider", "pytest_asyncio.plugin", "tests.interpreter"]
    options = [*(f"-p{plugin}" for plugin in plugins), f"--junit-xml={report}"]
    command = [sys.executable, "-m", "pytest", *options, str(folder.relative_to(ROOT))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    passed: dict[str, int] = {}
    bad: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        module = (case.get("classname") or case.get("name") or "").rpartition(".")[2]
        if any(child.tag in ("failure", "error", "skipped") for child in case):
            bad.add(module)
        else:
            passed[module] = passed.get(module, 0) + 1
    return Interpreted(done.returncode, done.stdout + done.stderr, passed, bad)
