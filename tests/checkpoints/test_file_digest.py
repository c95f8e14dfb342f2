"""The SHA-256 of a file is that of its bytes; a later start reads it from the cache while the file is the same."""

import hashlib
import os
from pathlib import Path

import pytest

from engine.checkpoints import file_digest
from engine.checkpoints.file_digest import file_digests


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of small files too."""
    monkeypatch.setattr(file_digest, "KEPT_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "callboard" / "weights"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    files: list[Path] = []
    compute = file_digest._computed

    def noted(path: Path) -> str:
        files.append(path)
        return compute(path)

    monkeypatch.setattr(file_digest, "_computed", noted)
    return files


def next_start() -> None:
    file_digest._digest_of.cache_clear()


def test_a_later_start_reads_no_weights(tmp_path: Path, computed: list[Path]) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 1000)
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    assert file_digests(files) == file_digests(files) == expected
    next_start()
    assert file_digests(files) == expected
    assert sorted(computed) == files


def test_another_content_is_read_again_even_by_its_old_name_size_and_time(tmp_path: Path, computed: list[Path]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    facts = path.stat()
    before = file_digests([path])
    while path.stat().st_ctime_ns == facts.st_ctime_ns:  # file systems count in ticks of some milliseconds
        path.write_bytes(b"two")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (facts.st_size, facts.st_mtime_ns, facts.st_ino)
    assert file_digests([path]) == [hashlib.sha256(b"two").hexdigest()] != before
    assert len(computed) == 2


def test_a_digest_that_was_damaged_in_the_cache_is_computed_again(
    tmp_path: Path, cache: Path, computed: list[Path]
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"numbers")
    expected = file_digests([path])
    (kept,) = cache.iterdir()
    for damage in (b"", kept.read_bytes()[:20], b"\xff" * 64):
        kept.write_bytes(damage)
        next_start()
        assert file_digests([path]) == expected
        assert kept.read_bytes() == expected[0].encode()
    assert len(computed) == 4


def test_a_blob_of_the_hub_is_known_by_its_name(tmp_path: Path, computed: list[Path]) -> None:
    digest = hashlib.sha256(b"numbers").hexdigest()
    blob, snapshot = tmp_path / "blobs" / digest, tmp_path / "snapshots" / "main" / "model.safetensors"
    for folder in (blob.parent, snapshot.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(b"numbers")
    snapshot.symlink_to(blob)
    assert file_digests([snapshot]) == [digest]
    assert computed == []
    copy = tmp_path / "copy"
    copy.write_bytes(b"numbers")
    assert file_digests([copy]) == [digest]
    assert computed == [copy]


def test_where_nothing_can_be_kept_it_is_computed_at_each_start(
    tmp_path: Path, computed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "weights"
    path.write_bytes(b"numbers")
    expected = [hashlib.sha256(b"numbers").hexdigest()]
    assert file_digests([path]) == file_digests([path]) == expected
    next_start()
    assert file_digests([path]) == expected
    assert len(computed) == 2
