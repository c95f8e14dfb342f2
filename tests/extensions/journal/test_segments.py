"""Files of the journal: what is left of them after a crash, and who may have them."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.types.errors import ConfigError
from server.extensions.journal import segments
from server.extensions.journal.segments import JournalSegments
from tests.small_disk import SmallDisk

RECORDS = [[b"\x01", b"\x02"], [msgspec.msgpack.encode("three" * 9)], [b"\x04", msgspec.msgpack.encode([5, "six"])]]


def write(folder: Path, frames: list[list[bytes]]) -> Path:
    """A folder with one file; returns that."""
    files = JournalSegments(folder)
    files.begin()
    for records in frames:
        files.write(records)
    files.close()
    return folder / "00000001.log"


def read(folder: Path) -> list[list[bytes]]:
    files = JournalSegments(folder)
    try:
        return [records for number in sorted(files.sizes) for records in files.read(number)]
    finally:
        files.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    assert read(tmp_path) == RECORDS


def test_a_last_record_torn_at_any_byte_is_cut_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, RECORDS)
    whole = path.read_bytes()
    begins = len(whole) - len(segments.frame_of(RECORDS[-1]))
    for end in range(begins, len(whole)):
        path.write_bytes(whole[:end])
        caplog.clear()
        assert read(tmp_path) == RECORDS[:-1]
        assert path.stat().st_size == begins
        assert (f"at byte {begins}, was torn" in caplog.text) == (end > begins)
        assert read(tmp_path) == RECORDS[:-1], "what was cut off stays so"
    for end in range(len(segments.MAGIC)):
        path.write_bytes(whole[:end])
        assert read(tmp_path) == []


def test_a_flipped_bit_ends_a_file_there_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, RECORDS)
    whole = path.read_bytes()
    other = tmp_path / "00000002.log"
    offsets = [len(segments.MAGIC)]
    for records in RECORDS:
        offsets.append(offsets[-1] + len(segments.frame_of(records)))
    for at in range(offsets[0], len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        other.write_bytes(whole)
        hit = next(number for number in range(len(RECORDS)) if at < offsets[number + 1])
        caplog.clear()
        assert read(tmp_path) == RECORDS[:hit] + RECORDS
        assert f"{path}: what lies from byte {offsets[hit]} on is broken" in caplog.text
        assert path.stat().st_size == len(whole), "what is broken is left for whoever looks at it"


def test_a_file_of_something_else_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "00000007.log").write_bytes(b"somebody's log\n" * 10)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == []
    assert "00000007.log is no file of this journal" in caplog.text


def test_two_servers_cannot_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LOCK_WITHIN_S", 0.1)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys; from server.extensions.journal.segments import JournalSegments; "
            f"held = JournalSegments(pathlib.Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"{tmp_path} is in use by another server \(process {holder.pid}\)"):
            JournalSegments(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    JournalSegments(tmp_path).close()


@pytest.mark.parametrize("name", ["/proc/callboard", "/dev/null/journal"])
def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"storage.folder: /(proc|dev)/.*needs a folder that it can write to"):
        JournalSegments(Path(name))


def test_a_disk_that_fills_up_leaves_no_half_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = JournalSegments(tmp_path)
    files.begin()
    files.write(RECORDS[0])
    disk = SmallDisk(monkeypatch)
    disk.room = 5
    with pytest.raises(OSError, match="No space"):
        files.write(RECORDS[1])
    with pytest.raises(OSError, match="No space"):
        files.begin()
    disk.room = 1 << 20
    files.write(RECORDS[2])
    files.close()
    assert read(tmp_path) == [RECORDS[0], RECORDS[2]]


def test_a_sync_without_a_free_descriptor_loses_none_and_has_the_same_to_do_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        earlier = JournalSegments(tmp_path)
        earlier.begin()
        earlier.close()
    files = JournalSegments(tmp_path)
    files.begin()
    before, synced = os.listdir("/proc/self/fd"), []

    def none_is_free(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", none_is_free)
        with pytest.raises(OSError, match="Too many open files"):
            files.unsynced()
    assert os.listdir("/proc/self/fd") == before
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        files.unsynced()()
    assert [name.rpartition("/")[2] for name in synced[:3]] == ["00000001.log", "00000002.log", "00000003.log"]
    assert os.listdir("/proc/self/fd") == before
    files.close()
