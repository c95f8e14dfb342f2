"""Loops that the threads of a step share: every item once, by threads that read nothing that another one is writing."""

import subprocess
from pathlib import Path

import pytest

from engine.kernels.sources import FOLDER
from engine.settings.own_kernels import c_compiler

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "team_threads.c"
# What is left out or turned round in team.c -> what stands there.
MISTAKES = {
    "a loop is not closed before it changes": ("write(is->state, number | CLOSED);", ""),
    "the leader does not wait for items": ("read(is->done) < loop->count", "0"),
    "an item is taken without a look at the others": (
        "__atomic_compare_exchange_n(&is->state, &state, state + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)",
        "(write(is->state, state + 1), 1)",
    ),
    "what a loop needs is written without order": ("__ATOMIC_RELEASE)", "__ATOMIC_RELAXED)"),
}


def run(folder: Path, source: str) -> str:
    """The output of the program with this text of team.c, and of the sanitizer.  It ends after a minute at most."""
    (folder / "team.c").write_text(source)
    made = folder / "team_threads"
    flags = ("-O2", "-g", "-fsanitize=thread", "-Wno-unknown-pragmas")
    command = [*c_compiler(), *flags, f"-I{folder}", f"-I{FOLDER}", str(PROGRAM), "-o", str(made), "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the compiler has no sanitizer of threads: {built.stderr[-200:]}")
    done = subprocess.run(["timeout", "60", str(made)], capture_output=True, text=True, check=False)
    if "FATAL: ThreadSanitizer" in done.stderr:
        pytest.skip(f"the sanitizer does not run here: {done.stderr[:200]}")
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def source() -> str:
    if not c_compiler():
        pytest.skip("there is no C compiler")
    return (FOLDER / "team.c").read_text()


def test_every_item_of_every_loop_is_computed_once(source: str, tmp_path: Path) -> None:
    assert run(tmp_path, source) == "shared\n"


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(right: str, wrong: str, source: str, tmp_path: Path) -> None:
    assert right in source, f"{right} is no longer in team.c"
    assert run(tmp_path, source.replace(right, wrong)) != "shared\n"
