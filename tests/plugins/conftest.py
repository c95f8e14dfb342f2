"""Plugins of other distributions, made on the spot."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(name, entry points, path=source, ...): what ``pip install`` would leave behind."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(distribution: str, entry_points: Mapping[str, str], sources: Mapping[str, str]) -> Path:
        information = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {module}\n" for name, module in entry_points.items()]
        (information / "entry_points.txt").write_text("[callboard]\n" + "".join(lines))
        for path, source in sources.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(source)
        importlib.invalidate_caches()
        return tmp_path

    yield install
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
