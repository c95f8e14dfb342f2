"""Threads wait briefly: OpenMP's unless the environment has decided, and those that run Python."""

import os
import subprocess
import sys

import pytest

from engine.host.waiting import SPINS, SWITCH_S, wait_briefly

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": "0"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "0"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_what_is_set_stays(given: dict[str, str], left: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    wait_briefly()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == left
    for name in NAMES:  # monkeypatch does not know what was set since
        os.environ.pop(name, None)


@pytest.mark.parametrize(("before", "after"), [(5e-3, SWITCH_S), (1e-4, 1e-4)])
def test_the_interpreter_is_handed_over_often(before: float, after: float) -> None:
    was = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        wait_briefly()
        assert sys.getswitchinterval() == pytest.approx(after, abs=2e-6)
    finally:
        sys.setswitchinterval(was)


def test_a_system_sets_it_before_torch_is_imported() -> None:
    code = (
        "import os, sys\nfrom engine.config import Config\nfrom engine.control.system import System\n"
        "System(Config())\nprint(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules, sys.getswitchinterval())"
    )
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept)
    assert done.stdout.split() == [SPINS, "False", str(SWITCH_S)]
