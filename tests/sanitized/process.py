"""A process that calls the kernels under the sanitizers of their compiler, which it must start with.

Owns: the process, seeds, what is said of a finding.  Does not know: what is called.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch

from engine.kernels import attention, compiled
from tests.sanitized.calls import CALLS
from tests.sanitized.models import decode
from tests.sanitized.sanitizers import compile_for, environment

GRACE_S = 900.0  # to import, compile and end


def run(level: str, seconds: float, first: int) -> None:
    """Call, in a process that has the sanitizers.  Each case follows from its seed, which is printed first."""
    compile_for(level)
    assert compiled.compiled() is not None, "the kernels were not compiled"
    end, seed, cases = time.monotonic() + seconds, first, (*CALLS, decode)
    while time.monotonic() < end or seed < first + len(cases):
        dice, case = Random(seed), cases[seed % len(cases)]
        torch.manual_seed(seed)
        torch.set_num_threads(dice.choice((1, 1, 2, 4)))
        attention.WORTH_THREADS = dice.choice((0, 1 << 20))
        print(f"{level} seed {seed}: {case.__name__}", flush=True)
        case(dice)
        seed += 1
    print(f"{level}: {seed - first} cases from seed {first} on, nothing found", flush=True)


def check(level: str, seconds: float, first: int) -> str:
    """Return the last line of a process of its own.  Raises AssertionError with what it found or where it hangs."""
    command = [sys.executable, "-m", "tests.sanitized", "--level", level, f"--seconds={seconds}", f"--seed={first}"]
    with tempfile.TemporaryFile("w+") as said:
        given = {**os.environ, **environment()}
        try:
            done = subprocess.run(
                command, env=given, stdout=said, stderr=subprocess.PIPE, text=True, timeout=seconds + GRACE_S,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip
            found = done.stderr if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            found = str(error)
        said.seek(0)
        last = (said.read().splitlines() or ["nothing ran"])[-1]
    assert not found, f"{last}\n{found}"
    return last
