"""The folder of what is stored: who may use it, what a disk that fails does, and what a crash leaves."""

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from engine.settings.sections import StorageSection
from engine.types.errors import ConfigError, RequestError
from server.extensions.storage import files as files_module
from server.extensions.storage import store as store_module
from server.extensions.storage.files import FileObject, Files
from server.extensions.storage.pages import Asked
from server.extensions.storage.store import PART, Store, check_storage
from server.extensions.stored_responses.table import ResponseTable
from tests.pace import far

HOUR_S = 3600


def section(path: Path, **settings: Any) -> StorageSection:
    return StorageSection(folder=str(path), **settings)


def file_of(name: str, num_bytes: int = 3, created_at: int = 1, expires_at: int | None = None) -> FileObject:
    return FileObject(
        id=name, bytes=num_bytes, created_at=created_at, expires_at=expires_at, filename="in.jsonl", purpose="batch"
    )


async def add(store: Store, files: Files, owner: str, file: FileObject) -> None:
    part = store.content(file.id + PART)
    part.write_bytes(b"x" * file.bytes)
    try:
        await files.add(owner, file, part)
    finally:
        part.unlink(missing_ok=True)


def names(store: Store) -> set[str]:
    return {path.name for path in store.content("x").parent.iterdir()}


def test_a_folder_is_one_servers_alone(tmp_path: Path) -> None:
    first = Store(section(tmp_path))
    with pytest.raises(ConfigError, match="another server uses it"):
        Store(section(tmp_path))
    first.close()
    Store(section(tmp_path)).close()


def test_other_users_of_the_machine_cannot_read_it(tmp_path: Path) -> None:
    Store(section(tmp_path / "kept")).close()
    assert (tmp_path / "kept" / "store").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/callboard")):
        with pytest.raises(ConfigError, match=rf"storage\.folder={folder}: cannot be written to"):
            check_storage(section(folder))
    check_storage(StorageSection())


def test_serve_ends_at_once_with_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    holder = Store(section(tmp_path))
    command = [sys.executable, "-m", "callboard", "serve", "--set", "server.port=0", "--set"]
    done = subprocess.run(
        [*command, f"storage.folder={tmp_path}"], capture_output=True, text=True, timeout=far(60), check=False
    )
    holder.close()
    assert done.returncode == 2
    assert "another server uses it" in done.stderr


def test_a_store_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    Store(section(tmp_path)).close()
    database = tmp_path / "store" / "index.sqlite3"
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="version 99"):
        Store(section(tmp_path))
    database.write_bytes(b"this is no database" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(section(tmp_path))


async def test_contents_that_no_row_names_go_at_the_start(tmp_path: Path) -> None:
    store = Store(section(tmp_path))
    await add(store, Files(store), "", file_of("file-a"))
    store.content("file-" + "b" * 32).write_text("of an upload whose row a crash has taken")
    store.content(f"file-output-{'c' * 32}.part").write_text("half")
    store.close()
    store = Store(section(tmp_path))
    assert names(store) == {"file-a"}
    store.close()


async def test_a_full_database_is_507_and_what_insists_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "TRY_AGAIN_S", 0.01)
    store = Store(section(tmp_path))
    files = Files(store)
    await store.run(lambda connection: connection.execute("PRAGMA max_page_count = 20"))
    stored = 0
    with pytest.raises(RequestError) as caught:
        for stored in range(1000):
            file = FileObject(id=f"f{stored}", bytes=0, created_at=1, filename="x" * 2000, purpose="batch")
            await add(store, files, "", file)
    assert (caught.value.status, caught.value.code) == (507, "storage_full")
    listed = await files.listed("", Asked(1000, "", descending=False), None)
    assert len(listed.data) == stored
    assert names(store) == {f"f{number}" for number in range(stored)}
    big = ("batch", 1, "a", 0, 1, None, b"x" * 100_000)
    insert = "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)"
    waiting = asyncio.create_task(store.insist(lambda connection: connection.execute(insert, big)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await store.run(lambda connection: connection.execute("PRAGMA max_page_count = 10000"))
    await asyncio.wait_for(waiting, far(5))
    assert len([one for one in caplog.records if "tried again" in one.message]) == 1
    store.close()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), 507, "storage_full"),
        (OSError(errno.EROFS, "Read-only file system", "/secret"), 503, "storage_failed"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/secret"), 404, "content_lost"),
    ],
)
async def test_a_failing_disk_is_named_without_its_paths(
    tmp_path: Path, error: OSError, status: int, code: str
) -> None:
    store = Store(section(tmp_path))

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO lines VALUES ('b', 1, 'a', 0, 1, NULL, NULL)")
        raise error

    with pytest.raises(RequestError) as caught:
        await store.run(fail)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert "secret" not in caught.value.message
    assert await store.run(lambda connection: connection.execute("SELECT * FROM lines").fetchall()) == []
    store.close()


async def test_an_owner_has_its_quota_and_others_have_theirs(tmp_path: Path) -> None:
    store = Store(section(tmp_path, quota_mb=1))
    files = Files(store)
    await add(store, files, "a", file_of("f1", 600_000))
    with pytest.raises(RequestError, match=r"storage\.quota_mb") as caught:
        await add(store, files, "a", file_of("f2", 600_000))
    assert (caught.value.status, caught.value.code) == (400, "storage_quota_exceeded")
    assert "f2" not in names(store)
    await add(store, files, "b", file_of("f3", 600_000))
    await files.delete("a", "f1")
    await add(store, files, "a", file_of("f4", 600_000))
    store.close()


async def test_what_has_expired_goes_and_what_a_batch_reads_stays(tmp_path: Path) -> None:
    now = time.time()
    store = Store(section(tmp_path, retention_hours=1), clock=lambda: now + 2 * HOUR_S)
    files = Files(store)
    assert files.expiry(10) == 10 + HOUR_S
    assert files.expiry(10, 60) == 70
    for name in ("f1", "f2", "f3"):
        await add(store, files, "", file_of(name, expires_at=int(now) + (HOUR_S if name != "f3" else 3 * HOUR_S)))
    batch = "INSERT INTO batches VALUES (?, '', ?, ?, 'f2', 0, 0, 0, '{}')"
    await store.run(lambda connection: connection.execute(batch, ("b1", "in_progress", int(now))))
    await store.run(lambda connection: connection.execute(batch, ("b2", "completed", int(now))))
    await files.sweep()
    left: Callable[[str], Any] = lambda table: store.run(  # noqa: E731
        lambda connection: [row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY id")]
    )
    assert await left("files") == ["f2", "f3"]
    assert await left("batches") == ["b1"]
    assert names(store) == {"f2", "f3"}
    store.close()


async def test_what_expires_at_once_goes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "SWEPT_AT_ONCE", 2)
    store = Store(section(tmp_path, retention_hours=1))
    files = Files(store)
    for number in range(5):
        await add(store, files, "", file_of(f"f{number}", expires_at=1))
        row = (f"r{number}", 1, 1)
        await store.run(lambda connection, row=row: connection.execute(INSERT, row))  # type: ignore[misc]
    await files.sweep()
    assert names(store) == set()
    for table in ("files", "responses"):
        query = f"SELECT count(*) FROM {table}"
        assert await store.run(lambda connection, query=query: connection.execute(query).fetchone()) == (0,)  # type: ignore[misc]
    store.close()


async def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    store = Store(section(tmp_path))
    with pytest.raises(RequestError) as caught:
        await Files(store).get("", "\ud800")
    assert caught.value.status == 400
    store.close()


async def test_a_full_disk_lets_files_go_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare, transact = tmp_path / "store" / "spare", Store._transact

    def full_but_for_the_spare(store: Store, work: Callable[[sqlite3.Connection], Any]) -> Any:
        if spare.exists():
            raise RequestError("full", status=507, code="storage_full")
        return transact(store, work)

    store = Store(section(tmp_path))
    files = Files(store)
    await add(store, files, "", file_of("f1"))
    monkeypatch.setattr(Store, "_transact", full_but_for_the_spare)
    with pytest.raises(RequestError):
        await files.get("", "f1")
    await files.delete("", "f1")
    assert names(store) == set()
    assert spare.exists()
    store.close()


INSERT = "INSERT INTO responses VALUES (?, '', 'completed', 0, 1, NULL, NULL, '', zeroblob(?), '{}', ?)"


async def fill(store: Store, num_bytes: int, prefix: str = "r") -> int:
    """Store responses until there is no room; returns how many."""
    for number in range(10_000):
        row = (f"{prefix}{number}", num_bytes, num_bytes)
        try:
            await store.run(lambda connection, row=row: connection.execute(INSERT, row))  # type: ignore[misc]
        except RequestError as error:
            if error.code != "storage_full":
                raise
            return number
    raise AssertionError("the disk was never full")


async def test_what_sqlites_log_holds_has_its_room_in_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, wal = (tmp_path / "store" / f"index.sqlite3{suffix}" for suffix in ("", "-wal"))
    allocate = os.posix_fallocate

    def small_disk(descriptor: int, offset: int, num_bytes: int) -> None:
        allocate(descriptor, offset, num_bytes)  # as a disk does that gives a part and has no more
        if offset + num_bytes > 1 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(section(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    await store.run(lambda connection: connection.execute("PRAGMA wal_autocheckpoint = 0"))
    await store.run(lambda connection: connection.execute(INSERT, ("first", 400_000, 1)))
    assert database.stat().st_size > 400_000
    assert wal.stat().st_size > 400_000
    await fill(store, 400_000)
    await fill(store, 900_000, "s")
    assert database.stat().st_size < 1 << 20
    assert wal.stat().st_size == 0
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may make a disk that is soon full")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def test_a_disk_that_is_full_takes_deletes_and_new_responses_have_their_room(small_disk: Path) -> None:
    filler = small_disk / "filler"

    def take_the_rest() -> None:
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    store = Store(section(small_disk))
    files, responses = Files(store), ResponseTable(store)
    await add(store, files, "", file_of("f", 100_000))
    num_stored = await fill(store, 50_000)
    take_the_rest()
    for number in range(num_stored):
        await responses.delete("", f"r{number}")
    await files.delete("", "f")
    store.close()
    take_the_rest()
    store = Store(section(small_disk))  # to start takes room as well
    filler.unlink()
    assert await fill(store, 50_000, "s") >= num_stored // 2
    store.close()


# ---- what an owner has stored ----------------------------------------------------------------


def sums(connection: sqlite3.Connection) -> dict[str, int]:
    return {owner: num_bytes for owner, num_bytes in connection.execute("SELECT * FROM owners") if num_bytes}


def counted(connection: sqlite3.Connection) -> dict[str, int]:
    """What the sums must be, from the rows."""
    query = f"SELECT owner, sum(bytes) FROM ({store_module.STORED}) GROUP BY owner"
    return dict(connection.execute(query).fetchall())


ROWS = (
    "INSERT INTO files VALUES ('f1', 'a', 'batch', 'x', 4000, 1, NULL), ('f2', 'b', 'batch', 'x', 1, 1, NULL)",
    "INSERT INTO batches VALUES ('b1', 'a', 'in_progress', 1, 'f1', 2, 1, 0, x'7b7d'), "
    "('b2', 'b', 'failed', 1, 'f2', 0, 0, 0, x'7b7d')",
    "INSERT INTO lines VALUES ('b1', 1, '\u00e9', 0, 9, 200, x'7b7d7b7d'), ('b1', 2, 'y', 9, 9, NULL, NULL)",
    "INSERT INTO responses VALUES ('r1', 'a', 'completed', 0, 1, NULL, NULL, NULL, x'5b5d', x'7b7d', 4)",
)


def test_a_store_of_the_version_before_opens_with_the_right_sums(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "index.sqlite3")) as connection:
        connection.executescript(f"{store_module.SCHEMA} PRAGMA user_version = 1;")
        for rows in ROWS:
            connection.execute(rows)
        connection.commit()
    (folder / "contents").mkdir()
    for name in ("f1", "f2"):
        (folder / "contents" / name).write_bytes(b"x")
    for _ in range(2):
        store = Store(section(tmp_path))
        assert sums(store._connection) == counted(store._connection)
        assert sums(store._connection) == {"a": 4000 + 514 + (4 + 4 + 512) + (2 + 512) + 516, "b": 512 + 514}
        store.close()


async def test_sums_follow_every_change(tmp_path: Path) -> None:
    store = Store(section(tmp_path))
    changes = (
        *ROWS,
        "INSERT OR IGNORE INTO lines VALUES ('b1', 2, 'z', 9, 9, NULL, NULL), ('b1', 3, 'z', 9, 9, NULL, NULL)",
        "UPDATE lines SET status = 200, answer = x'00112233' WHERE number = 2",
        "UPDATE batches SET body = x'7b2020207d'",
        "UPDATE responses SET bytes = 1000",
        "DELETE FROM lines WHERE number < 3",
        "DELETE FROM files WHERE id = 'f1'",
    )
    for change in changes:
        await store.run(lambda connection, change=change: connection.execute(change))  # type: ignore[misc]
        assert sums(store._connection) == counted(store._connection), change
    for table in ("lines", "files", "batches", "responses"):
        await store.run(lambda connection, table=table: connection.execute(f"DELETE FROM {table}"))  # type: ignore[misc]
    assert sums(store._connection) == {}
    store.close()
