"""Runs ``tests/attention/interpreted``: the triton backend's kernels on the CPU, in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.interpreted import Interpreted, interpret

pytest.importorskip("triton", reason="triton is not published for this system")

FOLDER = Path(__file__).with_name("interpreted")
MODULES = sorted(path.stem for path in FOLDER.glob("test_*.py"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    return interpret(FOLDER, tmp_path_factory.mktemp("interpreted") / "report.xml")


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_in_the_interpreter(ran: Interpreted, module: str) -> None:
    ran.check(module)
