"""What kernels of GPUs lack on a machine, and what to install."""

import re
from pathlib import Path

import pytest

from engine.settings import own_kernels
from engine.settings.own_kernels import missing_for_flashinfer, missing_for_triton

ROOT = Path(__file__).parents[2]


class Machine:
    """packages, programs: those that are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, include: Path, packages: str, programs: str) -> None:
        monkeypatch.setattr(own_kernels, "find_spec", lambda name: name if name in packages.split() else None)
        monkeypatch.setattr(own_kernels.shutil, "which", lambda name: name if name in programs.split() else None)
        monkeypatch.setattr(own_kernels.sysconfig, "get_path", lambda name: str(include))


@pytest.mark.parametrize(
    ("packages", "programs", "has_header", "expected"),
    [
        ("", "gcc", True, r"pip install 'callboard\[cuda\]'"),
        ("triton", "", True, "apt-get install gcc python3-dev"),
        ("triton", "gcc", False, r"apt-get install python3-dev, .*Python\.h is missing"),
        ("triton", "clang", True, "^$"),
    ],
)
def test_what_triton_lacks_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: str, programs: str, has_header: bool, expected: str
) -> None:
    Machine(monkeypatch, tmp_path, packages, programs)
    if has_header:
        (tmp_path / "Python.h").touch()
    assert re.search(expected, missing_for_triton())


@pytest.mark.parametrize(
    ("packages", "programs", "lacks"),
    [
        ("", "", False),
        ("flashinfer", "", True),
        ("flashinfer flashinfer_jit_cache", "", False),
        ("flashinfer", "nvcc", False),
    ],
)
def test_flashinfer_needs_kernels_that_are_built_or_what_builds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: str, programs: str, lacks: bool
) -> None:
    Machine(monkeypatch, tmp_path, packages, programs)
    assert ("flashinfer-jit-cache" in missing_for_flashinfer()) == lacks


def test_no_kernel_has_a_default_that_is_text() -> None:
    """Triton 3.6 compiles no call that leaves such a parameter out."""
    sources = [path.read_text() for path in (ROOT / "engine").rglob("*.py")]
    assert not [source for source in sources if re.search(r"tl\.constexpr = [\"']", source)]
