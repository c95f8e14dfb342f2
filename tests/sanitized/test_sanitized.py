"""The sanitizers find what they are for.  ``make sanitize``, which CI runs too, calls the kernels in C with them."""

import subprocess

import pytest

from engine.settings.own_kernels import c_compiler
from tests.sanitized import sanitizers
from tests.sanitized.sanitizers import missing


@pytest.mark.parametrize(
    "source",
    [
        "int main(void) { int x[4] = {0}; volatile int at = 4; return x[at]; }",
        "int main(void) { volatile int x = 0x7fffffff; return x + 1; }",
        "int main(void) { volatile float x = 1e30f; return (int)x; }",
        "int main(void) { return malloc(4) != NULL && (mallocs_left = 0, malloc(4)) == NULL ? 3 : 0; }",
    ],
)
def test_the_flags_find_what_they_are_for(source, tmp_path) -> None:
    if missing():
        pytest.skip(missing())
    (tmp_path / "wrong.c").write_text(source)
    command = [*c_compiler(), *sanitizers.FLAGS, "wrong.c", "-o", "wrong"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "wrong"], capture_output=True).returncode
