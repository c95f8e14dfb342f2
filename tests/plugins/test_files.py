"""Pages in files: torn ones, full disks, several processes at one folder, and a bound on all of it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from engine.config import Config, build_config
from engine.features.kv_store.records import DIGEST_BYTES, PageRecords
from engine.plugins.hookspecs import KVStoreContext
from engine.plugins.kinds import chosen_plugins
from engine.plugins.kv_store.files import FileStore, callboard_kv_store
from engine.types.errors import ConfigError, PluginError
from tests.small_disk import SmallDisk

PAGE_BYTES = 4096
RECORD_BYTES = DIGEST_BYTES + PAGE_BYTES


def records(path: Path, namespace: bytes = b"model", max_bytes: int = 1 << 20) -> PageRecords:
    return PageRecords(FileStore(path, max_bytes), namespace, PAGE_BYTES)


def page(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAGE_BYTES)


def save(pages: PageRecords, number: int, content: bytes | None = None) -> None:
    pages.save(page_hash(number), memoryview(bytearray(DIGEST_BYTES) + (content or page(number))))


def load(pages: PageRecords, number: int) -> bytes | None:
    record = bytearray(RECORD_BYTES)
    return bytes(record[DIGEST_BYTES:]) if pages.load(page_hash(number), memoryview(record)) else None


def page_hash(number: int) -> bytes:
    return number.to_bytes(32, "little")


def files(path: Path) -> list[Path]:
    return [one for one in path.glob("??/*") if one.is_file()]


def test_pages_outlive_the_store(tmp_path: Path) -> None:
    save(records(tmp_path), 1)
    assert load(records(tmp_path), 1) == page(1)


@pytest.mark.parametrize("what", ["model", "page"])
def test_who_differs_finds_nothing(tmp_path: Path, what: str) -> None:
    save(records(tmp_path), 1)
    assert load(records(tmp_path, b"model" if what == "page" else b"another"), 2 if what == "page" else 1) is None


@pytest.mark.parametrize("how", ["short", "long", "empty", "half zeros", "a bit", "another page's"])
def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path: Path, how: str) -> None:
    pages = records(tmp_path)
    save(pages, 1)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    other = records(tmp_path / "elsewhere")
    save(other, 2)
    damaged = {
        "short": content[:-1],
        "long": content + b"\0",
        "empty": b"",
        "half zeros": content[: RECORD_BYTES // 2].ljust(RECORD_BYTES, b"\0"),
        "a bit": content[:100] + bytes([content[100] ^ 1]) + content[101:],
        "another page's": files(tmp_path / "elsewhere")[0].read_bytes(),
    }[how]
    path.write_bytes(damaged)
    assert load(pages, 1) is None
    save(pages, 1)
    assert load(pages, 1) == page(1)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = records(tmp_path)
    save(pages, 1)
    disk = SmallDisk(monkeypatch)
    disk.room = 1000
    with pytest.raises(OSError, match="No space left"):
        save(pages, 2)
    assert len(files(tmp_path)) == 1
    assert not list((tmp_path / "incoming").iterdir())
    assert (load(pages, 1), load(pages, 2)) == (page(1), None)
    monkeypatch.undo()
    save(pages, 2)
    assert load(pages, 2) == page(2)


def test_those_used_longest_ago_go_when_it_is_full(tmp_path: Path) -> None:
    pages = records(tmp_path, max_bytes=10 * RECORD_BYTES)
    for number in range(10):
        save(pages, number)
        path = pages.store._place(pages._name(page_hash(number)))  # type: ignore[attr-defined]
        os.utime(path, (number, number))
    assert load(pages, 0) == page(0)
    save(pages, 10)
    assert len(files(tmp_path)) == 10
    found = {number for number in range(11) if load(pages, number)}
    assert found == {0, *range(2, 11)}, "1 was used longest ago, 0 just now"


def test_what_other_processes_write_counts_and_what_dead_ones_began_is_removed(tmp_path: Path) -> None:
    first, second = (records(tmp_path, max_bytes=40 * RECORD_BYTES) for _ in range(2))
    begun = tmp_path / "incoming" / f"{'ab' * 32}.{'0' * 32}"
    begun.write_bytes(b"half")
    os.utime(begun, (0, 0))
    for number in range(200):
        save((first, second)[number % 2], number)
        assert len(files(tmp_path)) <= 44, "at most a tenth more than is allowed"
    assert not begun.exists()


WRITER = """
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tests.plugins.test_files import records, save
pages = records(Path(sys.argv[1]), max_bytes=150_000)
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 300):
    save(pages, number % 100)
"""


def test_two_processes_at_one_folder_never_see_anything_wrong(tmp_path: Path) -> None:
    """They write the same pages, and remove each other's, while a third one reads."""
    pages = records(tmp_path, max_bytes=150_000)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(first)]) for first in (0, 50)]
    found = 0
    while any(writer.poll() is None for writer in writers):
        for number in range(100):
            content = load(pages, number)
            assert content in (None, page(number))
            found += content is not None
    assert [writer.wait() for writer in writers] == [0, 0]
    assert found
    assert any(load(pages, number) for number in range(100))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    context = KVStoreContext(record_bytes=1, namespace="", options={"path": str(tmp_path / "file" / "below")})
    with pytest.raises(PluginError, match=r"kv_store\.files: path='.*below' cannot be used: .*; name another folder"):
        callboard_kv_store(context)


FOREIGN = (".ssh/id_ed25519", "docs/thesis.txt", "ab/notes.txt", f"ab/{'cd' * 32}", "incoming/a.bin")


def foreign_tree(path: Path, names: Iterable[str] = FOREIGN) -> Callable[[], bool]:
    """Make files that are none of a store's; returns what says whether all are as they were."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
        os.utime(path / name, (0, 0))
    return lambda: all((path / name).read_text() == name for name in names)


@pytest.mark.parametrize("names", [FOREIGN, *((name,) for name in FOREIGN), ("sweep.lock", *FOREIGN)])
def test_a_folder_with_files_of_others_is_refused_and_nothing_in_it_goes(tmp_path: Path, names: tuple[str]) -> None:
    is_whole = foreign_tree(tmp_path, names)
    with pytest.raises(ConfigError, match=r"kv_store\.files: path='.*' has .*, which no such store wrote"):
        FileStore(tmp_path, 1)
    assert is_whole()
    assert {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()} == set(names)


def test_files_of_others_in_a_store_are_not_counted_and_outlive_it(tmp_path: Path) -> None:
    pages = records(tmp_path, max_bytes=3 * RECORD_BYTES)
    is_whole = foreign_tree(tmp_path)
    elsewhere = tmp_path.with_name("elsewhere")
    others = foreign_tree(elsewhere, ["12/" + "12" * 32])
    (tmp_path / "12").symlink_to(elsewhere / "12")
    (tmp_path / "34").mkdir()
    (tmp_path / "34" / ("34" * 32)).symlink_to(elsewhere / "12" / ("12" * 32))
    for number in range(20):
        save(pages, number)
    pages.store.close()
    FileStore(tmp_path, 1)
    assert is_whole()
    assert others()
    assert len(files(tmp_path)) == 2 + 2, "two foreign ones below ab, two links; every record has gone"


def test_a_folder_of_an_earlier_version_is_adopted(tmp_path: Path) -> None:
    save(records(tmp_path), 1)
    (tmp_path / "incoming" / "machine-77-140003182123456-3").write_bytes(b"half")
    (tmp_path / "callboard-kv-store").unlink()
    assert load(records(tmp_path), 1) == page(1)
    assert (tmp_path / "callboard-kv-store").exists()


def test_a_folder_of_other_records_by_their_digests_is_none_of_an_earlier_version(tmp_path: Path) -> None:
    is_whole = foreign_tree(tmp_path, [f"{name[:2]}/{name}" for name in ("ab" * 32, "cd" * 32)])
    with pytest.raises(ConfigError, match="has ab, which no such store wrote"):
        FileStore(tmp_path, 1)
    assert is_whole()


def test_there_is_no_store_unless_it_is_named() -> None:
    assert "kv_store" not in chosen_plugins(Config())
    assert chosen_plugins(build_config(Config(), {"plugins": {"kv_store": "files"}}))["kv_store"] == "files"
