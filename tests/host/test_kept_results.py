"""Results that are kept: they are read for what they were found for, and a file that is broken costs a line."""

import logging
from pathlib import Path

import msgspec
import pytest

from engine.host.kept_results import KeptResults

Times = dict[str, float]


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    rows: int


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "callboard" / "measured"


def test_results_are_those_of_the_same_subject_and_all_that_they_depend_on(folder: Path) -> None:
    kept = KeptResults("kernels", "a CPU, 4 cores", (1, "x"), Times)
    assert kept.load() is None
    kept.keep({"a": 1.5})
    assert KeptResults("kernels", "a CPU, 4 cores", (1, "x"), Times).load() == {"a": 1.5}
    for subject, about, holds_for in (
        ("tiles", "a CPU, 4 cores", (1, "x")),
        ("kernels", "a CPU, 5 cores", (1, "x")),
        ("kernels", "a CPU, 4 cores", (2, "x")),
    ):
        assert KeptResults(subject, about, holds_for, Times).load() is None
    (file,) = folder.iterdir()
    assert file == kept.path
    assert file.name.startswith("kernels_a_CPU_4_cores-")
    assert msgspec.json.decode(file.read_bytes())["about"] == "a CPU, 4 cores"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b'{"about": "", "resu',
        b'{"results": {"rows": 1}}',
        b"[]",
        b'{"about": "", "results": {"r": 1}}',
    ],
)
def test_a_broken_file_is_a_line_in_the_log_and_is_replaced(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptResults("kernels", "here", (), Limits)
    assert kept.path is not None
    folder.mkdir(parents=True)
    kept.path.write_bytes(content)
    assert kept.load() is None
    assert f"kernels: results in {kept.path} are not used: " in caplog.text
    kept.keep(Limits(rows=2))
    assert kept.load() == Limits(rows=2)


def test_a_file_that_cannot_be_written_or_read_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "callboard").write_text("in the way")
    kept = KeptResults("kernels", "here", (), Limits)
    kept.keep(Limits(rows=2))
    assert "kernels: results are not kept for the next start: " in caplog.text
    (tmp_path / "callboard").unlink()
    assert kept.path is not None
    kept.path.mkdir(parents=True)
    assert kept.load() is None
    assert "are not used: " in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    kept = KeptResults("kernels", "here", (), Limits)
    kept.keep(Limits(rows=2))
    assert (kept.path, kept.load()) == (None, None)
