"""Runs the modules of ``tests/kernels/interpreted`` with Triton's interpreter, which stands in for a GPU."""

import importlib.util
from pathlib import Path

import pytest

from tests.interpreted import Interpreted, interpret

FOLDER = Path(__file__).with_name("interpreted")
MODULES = sorted(path.stem for path in FOLDER.glob("test_*.py"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    return interpret(FOLDER, tmp_path_factory.mktemp("interpreted") / "report.xml")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("module", MODULES)
def test_in_the_interpreter(ran: Interpreted, module: str) -> None:
    ran.check(module)
