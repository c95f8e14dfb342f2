"""Files that are only appended to: what is in them is whole, whatever the disk or a crash did."""

from pathlib import Path

import pytest

from engine.host.appended_file import HEADER, AppendedFile, Frames, frame, whole_file
from tests.small_disk import SmallDisk

PAYLOADS = [b"one", b"two" * 9, b"\0"]


def read(path: Path, start: int = 0) -> tuple[list[bytes], int, str]:
    with path.open("rb") as file:
        file.seek(start)
        frames = Frames(file)
        return list(frames), frames.end, frames.broken


def write(path: Path) -> bytes:
    file = AppendedFile(path, b"head")
    for payload in PAYLOADS:
        file.append(frame(payload))
    file.close()
    assert file.size == path.stat().st_size
    return path.read_bytes()


def test_frames_are_read_up_to_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = write(path)
    assert read(path, 4) == (PAYLOADS, len(whole), "")
    last = len(whole) - len(frame(PAYLOADS[-1]))
    for end in range(last + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert read(path, 4) == (PAYLOADS[:-1], last, "torn")
    for end in range(last + 1, len(whole)):
        path.write_bytes(whole[:end] + bytes(len(whole) - end))
        assert read(path, 4) in ((PAYLOADS[:-1], last, "torn"), (PAYLOADS, len(whole), ""))


def test_damage_in_front_of_other_data_is_no_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = bytearray(write(path))
    whole[4 + HEADER.size] ^= 1
    path.write_bytes(whole)
    assert read(path, 4) == ([], 4, "damaged")
    path.write_bytes(bytes(64))
    assert read(path) == ([], 0, "damaged"), "what a loss of power may leave"


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_takes_all_of_some_data_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    disk = SmallDisk(monkeypatch)
    file = AppendedFile(tmp_path / "file", b"head")
    disk.room = room
    with pytest.raises(OSError, match="No space"):
        file.append(b"more than that")
    with pytest.raises(OSError, match="No space"):
        AppendedFile(tmp_path / "other", b"another head")
    with pytest.raises(OSError, match="No space"), whole_file(tmp_path / "a", tmp_path / "b", is_synced=False) as whole:
        whole.append(b"more than that")
    disk.room = 1 << 20
    file.append(b", tail")
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"head, tail"


def test_a_file_that_is_there_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"others'")
    with pytest.raises(FileExistsError):
        AppendedFile(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"others'"


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path, is_synced: bool) -> None:
    path, begun = tmp_path / "file", tmp_path / "file.part"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="planted"), whole_file(path, begun, is_synced=is_synced) as file:
        file.append(b"half")
        raise ValueError("planted")
    assert (path.read_bytes(), begun.exists()) == (b"old", False)
    with whole_file(path, begun, b"new", is_synced=is_synced):
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), begun.exists()) == (b"new", False)
    assert path.stat().st_mode & 0o777 == 0o600
