"""The folder in which the server keeps what its clients stored: one SQLite database, and a file for each content.

Owns: the lock on the folder, the tables, the thread on which they are read and written, what a failing disk is called.
Does not know: what the tables are for, HTTP.
All work is short transactions on one thread, in the order in which it was asked for, so the event loop never waits for
a disk, and a second request sees what the first has done.  A content is written beside its place and moved there; one
that
no row of ``files`` names was never finished, and is removed at the next start.
SQLite's log gets a transaction first and can only be emptied into the database.  So the database gets the room for it
before the transaction is over: the log can always be emptied, and a full disk lets things be deleted.
"""

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final, TypeVar

from aiohttp import web

from engine.host.disk import make_folder, sync_folder
from engine.settings.sections import StorageSection
from engine.types.errors import ConfigError, RequestError
from server.extensions.storage.settings import FileSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
Connection = sqlite3.Connection

VERSION: Final = 2  # of the tables
SCHEMA: Final = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX files_of_owner ON files (owner, created_at, bytes);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    input_file_id TEXT NOT NULL, total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL
);
CREATE INDEX batches_of_owner ON batches (owner, created_at);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL,
    length INTEGER NOT NULL, status INTEGER, answer BLOB, PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)
);
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, background INTEGER NOT NULL,
    created_at INTEGER NOT NULL, previous TEXT, seed INTEGER, request BLOB, input BLOB NOT NULL, object BLOB NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX responses_of_owner ON responses (owner, bytes);
CREATE INDEX responses_by_status ON responses (status);
"""
# What a row counts in its owner's sum of bytes: at least what it takes of the disk besides its content.  Lines of a
# batch take room for a line of its output that says that they were not run.
SIZES: Final = {
    "files": ("{row}.owner", "max({row}.bytes, 512)"),
    "batches": ("{row}.owner", "length({row}.body) + 512"),
    "lines": (
        "(SELECT owner FROM batches WHERE id = {row}.batch)",
        "2 * length(CAST({row}.custom_id AS BLOB)) + coalesce(length({row}.answer), 0) + 512",
    ),
    "responses": ("{row}.owner", "{row}.bytes + 512"),
}
SUMS: Final = "CREATE TABLE owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;" + "".join(
    f"""
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
    INSERT OR IGNORE INTO owners VALUES ({owner.format(row="NEW")}, 0);
    UPDATE owners SET bytes = bytes + {size.format(row="NEW")} WHERE owner = {owner.format(row="NEW")};
END;
CREATE TRIGGER {table}_changed AFTER UPDATE ON {table} WHEN {size.format(row="NEW")} != {size.format(row="OLD")} BEGIN
    UPDATE owners SET bytes = bytes + {size.format(row="NEW")} - ({size.format(row="OLD")})
    WHERE owner = {owner.format(row="NEW")};
END;
CREATE TRIGGER {table}_gone AFTER DELETE ON {table} BEGIN
    UPDATE owners SET bytes = bytes - ({size.format(row="OLD")}) WHERE owner = {owner.format(row="OLD")};
END;
"""
    for table, (owner, size) in SIZES.items()
)
STORED: Final = " UNION ALL ".join(
    f"SELECT {owner.format(row=table)} AS owner, {size.format(row=table)} AS bytes FROM {table}"
    for table, (owner, size) in SIZES.items()
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TRY_AGAIN_S = 2.0
MOST_TRIES = 300  # of what can fail in the end
QUOTA_EXCEEDED: Final = "storage_quota_exceeded"
SPARE_BYTES = 1 << 20
DATABASE: Final = "index.sqlite3"
PART: Final = ".part"  # a content that is being written
CONTENT: Final = re.compile(rf"file-([a-z]+-)?[0-9a-f]{{32}}({re.escape(PART)})?")


class Store:
    """Opened at the server's start.  clock: seconds since 1970.

    Raises ConfigError for a folder that cannot be written to, is another server's, or holds what is no such store."""

    def __init__(self, section: StorageSection, clock: Callable[[], float] = time.time) -> None:
        self.settings = FileSettings.read(section)
        self.clock = clock
        self._folder = Path(section.folder) / "store"
        self._spare = self._folder / "spare"
        self._is_failing = False
        self._said = f"storage.folder={section.folder}"
        with ExitStack() as held:
            try:
                make_folder(self._folder)
                make_folder(self._folder / "contents")
                lock = self._hold(held, "lock")
            except OSError as error:
                raise ConfigError(f"{self._said}: cannot be written to: {error.strerror}") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._database = self._hold(held, DATABASE)
                self._check_spare()
                self._spare.unlink(missing_ok=True)  # to open a database takes room as well
                self._connection = self._open()
                held.callback(self._connection.close)
                self._sweep_contents()
                self.reserve()
            except BlockingIOError:
                raise ConfigError(f"{self._said}: another server uses it; give each a folder of its own") from None
            except (sqlite3.Error, OSError) as error:
                raise ConfigError(f"{self._said}: the store in it cannot be used: {error}") from None
            self._held = held.pop_all()
        self._thread = ThreadPoolExecutor(1, "storage")

    def close(self) -> None:
        """Let go of the folder, once what was asked for is done."""
        self._thread.shutdown()
        self._held.close()

    def content(self, file_id: str) -> Path:
        """Returns where the content of a file lies.

        file_id: as a row of ``files`` has it, never as a client says it."""
        return self._folder / "contents" / file_id

    @staticmethod
    def sync(file: IO[bytes]) -> None:
        """Wait until what was written to a content is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def place(self, part: Path, file_id: str) -> None:
        """Move a content that was written to ``part`` to where it belongs, to stay there over a power cut.

        To be called within ``run``, with the row that names it."""
        part.rename(self.content(file_id))
        sync_folder(self._folder / "contents")

    async def run(self, work: Callable[[Connection], T], *, frees: bool = False) -> T:
        """Returns what ``work`` does in one transaction, on the store's thread.  frees: it makes room.

        Raises RequestError for a disk that is full (507) or fails (503); then nothing of it was done."""
        transact = self._make_room if frees else self._transact
        return await asyncio.get_running_loop().run_in_executor(self._thread, transact, work)

    async def insist(self, work: Callable[[Connection], T], *, frees: bool = False, gives_up: bool = False) -> T:
        """Do as ``run`` does, again and again for as long as the disk is full or fails; gives_up: for ten minutes."""
        for number in itertools.count(1):
            try:
                result = await self.run(work, frees=frees)
            except RequestError as error:
                if error.status < 500 or (gives_up and number >= MOST_TRIES):
                    raise
                # Once: many may wait at the same time, and the log may lie on the same disk.
                if not self._is_failing:
                    log.error("%s: %s; it is tried again", self._said, error)
                self._is_failing = True
            else:
                self._is_failing = False
                return result
            await asyncio.sleep(TRY_AGAIN_S)
        raise AssertionError("counting has no end")

    def reserve(self) -> None:
        """Keep a little of the disk back: to delete something takes room as well.  To be called within ``run``."""
        if self._spare.exists():
            return
        try:
            self._spare.write_bytes(bytes(SPARE_BYTES))
        except OSError:
            self._spare.unlink(missing_ok=True)

    def _check_spare(self) -> None:
        """Raises ConfigError for a file that no store keeps room by."""
        with suppress(FileNotFoundError):
            if self._spare.stat().st_size > SPARE_BYTES or any(self._spare.read_bytes()):
                raise ConfigError(f"{self._said}: {self._spare} is no file of a store; name another folder")

    def _make_room(self, work: Callable[[Connection], T]) -> T:
        try:
            return self._transact(work)
        except RequestError as error:
            if error.code != "storage_full":
                raise
        self._spare.unlink(missing_ok=True)
        try:
            return self._transact(work)
        finally:
            self._empty_log()
            self.reserve()

    def _transact(self, work: Callable[[Connection], T]) -> T:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                self._allocate()
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result
        except (sqlite3.OperationalError, OSError) as error:
            said = disk_error(error)
            if said.code == "storage_full":
                self._empty_log()
            raise said from error
        except UnicodeEncodeError:
            raise RequestError("half of a surrogate pair is no text, and cannot be stored or looked for") from None

    def _allocate(self) -> None:
        """Give the database the room on the disk that the transaction will need in it.  Raises OSError."""
        (needed,) = self._connection.execute(
            "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        ).fetchone()
        num_bytes = os.fstat(self._database).st_size
        if needed > num_bytes:
            try:
                os.posix_fallocate(self._database, num_bytes, needed - num_bytes)
            except OSError:
                os.ftruncate(self._database, num_bytes)
                raise

    def _empty_log(self) -> None:
        """Move what is in SQLite's log into the database, and give its room back."""
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _hold(self, held: ExitStack, name: str) -> int:
        """Returns a descriptor of a file of the folder.  Raises OSError.

        To close one of the database lets go of SQLite's locks on it, so that is done behind the connection."""
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held.callback(os.close, descriptor)
        return descriptor

    def _open(self) -> Connection:
        connection = sqlite3.connect(self._folder / DATABASE, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # what was acknowledged outlives a power cut
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if not version:
                connection.executescript(f"BEGIN; {SCHEMA} {SUMS} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version == 1:  # which had no sums
                fill = f"INSERT INTO owners SELECT owner, sum(bytes) FROM ({STORED}) GROUP BY owner;"
                connection.executescript(f"BEGIN; {SUMS} {fill} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise ConfigError(f"{self._said}: its store is of version {version}, this server writes {VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _sweep_contents(self) -> None:
        known = {file_id for (file_id,) in self._connection.execute("SELECT id FROM files")}
        for path in (self._folder / "contents").iterdir():
            if path.name not in known and CONTENT.fullmatch(path.name):
                path.unlink()


STORE: web.AppKey[Store] = web.AppKey("store", Store)  # set where storage.folder is


def check_storage(section: StorageSection) -> None:
    """Raise ConfigError for a folder that a server could not keep anything in."""
    if section.folder:
        Store(section).close()


def disk_error(error: Exception) -> RequestError:
    """Returns what a client learns of a disk that does not do what it should.  It names no path."""
    if isinstance(error, FileNotFoundError):
        return RequestError("the content of the file is gone from the server's disk", status=404, code="content_lost")
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in FULL:
        reason = "the server's disk is full; nothing was stored"
        return RequestError(reason, status=507, code="storage_full")
    why = error.strerror if isinstance(error, OSError) else getattr(error, "sqlite_errorname", "")
    reason = f"the server cannot write to its storage ({why}); nothing was stored"
    return RequestError(reason, status=503, code="storage_failed")


def check_quota(connection: Connection, settings: FileSettings, owner: str, more_bytes: int = 0) -> None:
    """Raise RequestError (400) if an owner has more stored than it may, with what the transaction has written so far.

    more_bytes: that it wants to store besides."""
    row = connection.execute("SELECT bytes FROM owners WHERE owner = ?", (owner,)).fetchone()
    needed = (row[0] if row else 0) + more_bytes
    if needed > (most := settings.quota_mb << 20):
        raise RequestError(
            f"with this you would have {needed} bytes stored and may have {most} (storage.quota_mb); "
            "delete files or responses",
            code=QUOTA_EXCEEDED,
        )
