"""Files of the cache folder are whole, whoever writes them at the same time."""

import os
from pathlib import Path

import pytest

from engine.host.cache_folder import replace_file


def test_two_threads_that_write_one_file_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = tmp_path / "folder" / "file", os.replace

    def after_another(*files: Path | str) -> None:
        monkeypatch.setattr("os.replace", replace)
        replace_file(path, b"the other's")
        replace(*files)

    monkeypatch.setattr("os.replace", after_another)
    replace_file(path, b"this one's")
    assert path.read_bytes() == b"this one's"
    assert os.listdir(path.parent) == ["file"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power may leave the name of a file that is cut short."""
    path, order, sync, replace = tmp_path / "file", [], os.fsync, os.replace

    def synced(file: int) -> None:
        order.append((os.fstat(file).st_size, path.exists()))
        sync(file)

    def named(*files: Path | str) -> None:
        order.append("named")
        replace(*files)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", named)
    replace_file(path, b"content")
    assert order[:2] == [(7, False), "named"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        replace_file(tmp_path / "file", b"content")
    assert os.listdir(tmp_path) == ["file"]
