"""The page's scripts in Node, where a browser is not needed: each program ends with an error if anything is wrong."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not on the PATH")
@pytest.mark.parametrize("name", ["playground_pictures", "sessions_table"])
def test_program(name: str) -> None:
    ran = subprocess.run(["node", PROGRAMS / f"{name}.mjs"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
