"""The rows of ``make machines``: what a run of the suite finds in them, and what they are judged by."""

import sys
from pathlib import Path

import pytest

from tests import machines

pytestmark = pytest.mark.slow


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only file of a suite that stands for this one."""
    monkeypatch.setattr(machines, "ROOT", tmp_path)
    return tmp_path / "test_one.py"


def test_a_row_has_its_own_variables_and_none_of_this_machine(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machines.CHOICES:
        monkeypatch.setenv(name, "of this machine")
    found = {**dict.fromkeys(machines.CHOICES), "OPENBLAS_CORETYPE": "Haswell", "CC": "no-compiler-here"}
    compilers = "[which(name) for name in ('cc', 'gcc', 'c++', 'g++', 'clang')] == 5 * [None]"
    suite.write_text(
        f"import os\nfrom shutil import which\ndef test_it():\n assert {compilers} and which('env')\n"
        f" assert {{name: os.environ.get(name) for name in {found}}} == {found}"
    )
    result = machines.run("haswell+no-compiler", ["-p", "no:cacheprovider"])
    assert (result["passed"], result["ok"]) == (1, True), result


@pytest.mark.parametrize(
    "test",
    [
        "def test_it(): assert False",
        "import pytest\n@pytest.fixture\ndef broken(): raise OSError\ndef test_it(broken): pass\ndef test_two(): pass",
        "import a_module_that_is_not_here",
        "import os\nos._exit(3)",
    ],
)
def test_what_fails_breaks_or_dies_fails_the_command(suite: Path, monkeypatch: pytest.MonkeyPatch, test: str) -> None:
    suite.write_text(test)
    monkeypatch.setattr(sys, "argv", ["machines", "zen", "--options", "-p no:cacheprovider"])
    with pytest.raises(SystemExit) as end:
        machines.main()
    assert end.value.code


def test_what_hangs_is_ended_and_named(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.write_text("import time\ndef test_it(): time.sleep(600)\ndef test_two(): pass")
    monkeypatch.setattr(machines, "LONGEST_S", 3)
    result = machines.run("as it is", ["-p", "no:cacheprovider", "-n", "1"])
    assert (result["which"], result["passed"], result["ok"]) == (["test_one.py::test_it"], 1, False), result
