"""Files of the cache folder are whole, also when several threads write them at the same time."""

import os
from pathlib import Path

import pytest

from engine.host.cache_folder import replace_file, writable_folder


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


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the folder that stands in for the cache folder's parent."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"callboard-{os.getuid()}"


def test_without_a_home_it_is_among_temporary_files_and_this_users_alone(no_home: Path) -> None:
    for _ in range(2):  # made, found
        assert writable_folder("kernels") == no_home / "kernels"
        assert no_home.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_could_have_filled_is_not_taken(
    no_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_home.mkdir()
    no_home.chmod(0o770)
    assert writable_folder("kernels") is None
    no_home.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    no_home.symlink_to(tmp_path / "elsewhere")
    assert writable_folder("kernels") is None
    no_home.unlink()
    no_home.mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    no_home.rename(tmp_path / f"callboard-{owner + 1}")
    assert writable_folder("kernels") is None


def test_with_a_home_it_is_the_cache_folder(no_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert writable_folder("kernels") == tmp_path / "cache" / "callboard" / "kernels"
    assert not no_home.exists()
