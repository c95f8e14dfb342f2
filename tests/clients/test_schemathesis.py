"""Schemathesis: requests made from /openapi.json, right and wrong ones.  ``make conformance`` installs it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("schemathesis", reason="schemathesis is not installed: make conformance")
CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"


# Random requests, and with them one for each border of each field, which are thousands.
@pytest.mark.parametrize("phases", ["examples,fuzzing", pytest.param("coverage,stateful", marks=pytest.mark.long)])
def test_answers_are_what_the_document_says(root: str, tmp_path: Path, phases: str) -> None:
    program = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    options = [
        "--checks",
        CHECKS,
        "--phases",
        phases,
        "--max-examples",
        "6",
        "--seed",
        "1",
        "--request-timeout",
        "60",
        "--no-color",
    ]
    command = [sys.executable, "-c", program, "run", f"{root}/openapi.json", *options]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
