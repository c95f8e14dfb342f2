"""A cache folder of a test's own, which has the kernels that this machine has compiled and nothing else."""

from pathlib import Path

import pytest

from engine.host.cache_folder import writable_folder


def use_own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let the test and its processes keep results in a folder.  Kernels would take them seconds each time."""
    link_kernels(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def link_kernels(folder: Path) -> None:
    """Let a folder for all caches have the kernels of ours."""
    if (kept := writable_folder("kernels")) is not None:
        (folder / "callboard").mkdir(parents=True)
        (folder / "callboard" / "kernels").symlink_to(kept)
