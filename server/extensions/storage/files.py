"""The table of files.

Owns: what is said of a file, and how files come and go.  Does not know: HTTP, what is in them.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from engine.types.errors import RequestError
from server.extensions.storage.pages import Asked, ListPage
from server.extensions.storage.store import Connection, Store, check_quota

HOUR_S = 3600
SWEPT_AT_ONCE = 64  # in a transaction: what that takes of a full disk is less than what the store keeps back
COLUMNS = "id, owner, purpose, filename, bytes, created_at, expires_at"
IN_USE = "SELECT input_file_id FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file.  bytes: its size.  created_at, expires_at: seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class Deleted(msgspec.Struct, frozen=True):
    """The answer for what is gone."""

    id: str
    object: str
    deleted: bool = True


class Files:
    """Files of all owners; each sees its own alone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def expiry(self, created_at: int, within_s: int | None = None) -> int | None:
        """Returns when something goes that was made then; None for never.  within_s: what its client asked for."""
        hours = self._store.settings.retention_hours
        spans = [span for span in (hours * HOUR_S, within_s) if span]
        return created_at + min(spans) if spans else None

    async def add(self, owner: str, file: FileObject, part: Path) -> None:
        """Take a content that was written to ``part``.  Raises RequestError: 400, 507."""

        def work(connection: Connection) -> None:
            insert_file(connection, owner, file)
            check_quota(connection, self._store.settings, owner)
            self._store.place(part, file.id)

        try:
            await self._store.run(work)
        except RequestError:
            self._store.content(file.id).unlink(missing_ok=True)
            raise

    async def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise RequestError (400) for more than an owner may store."""
        await self._store.run(lambda connection: check_quota(connection, self._store.settings, owner, num_bytes))

    async def get(self, owner: str, file_id: str) -> FileObject:
        """Raises RequestError (404)."""
        return await self._store.run(lambda connection: find_file(connection, owner, file_id))

    async def listed(self, owner: str, asked: Asked, purpose: str | None) -> ListPage:
        """Returns a part of an owner's files."""
        than, order = asked.sql

        def work(connection: Connection) -> ListPage:
            after = find_file(connection, owner, asked.after) if asked.after else None
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM files WHERE owner = ? AND (? IS NULL OR purpose = ?)"
                f" AND (? IS NULL OR (created_at, id) {than} (?, ?)) ORDER BY created_at {order}, id {order} LIMIT ?",
                (
                    owner,
                    purpose,
                    purpose,
                    after and after.id,
                    after and after.created_at,
                    after and after.id,
                    asked.limit + 1,
                ),
            ).fetchall()
            return asked.page([row[0] for row in rows], [_file(row) for row in rows])

        return await self._store.run(work)

    async def delete(self, owner: str, file_id: str) -> None:
        """Raises RequestError: 404, or 409 for one that a batch still reads."""

        def work(connection: Connection) -> None:
            file = find_file(connection, owner, file_id)
            if connection.execute(f"SELECT 1 WHERE ? IN ({IN_USE})", (file.id,)).fetchone():
                raise RequestError(
                    "a batch that has not ended reads this file; cancel it first", status=409, code="file_in_use"
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file.id,))

        await self._store.run(work, frees=True)
        await self._remove([file_id])

    async def sweep(self) -> None:
        """Let go of what has expired.  Raises RequestError for a disk that is full (507) or fails (503)."""
        now, hours = int(self._store.clock()), self._store.settings.retention_hours
        expired = [("files", f"expires_at <= ? AND id NOT IN ({IN_USE})", now)]
        if hours:
            ended = "'completed', 'incomplete', 'failed', 'cancelled'"
            expired.append(("responses", f"created_at <= ? AND status IN ({ended})", now - hours * HOUR_S))
            expired.append(("batches", f"created_at <= ? AND status IN ({ended}, 'expired')", now - hours * HOUR_S))
        for table, condition, when in expired:
            some = f"SELECT id FROM {table} WHERE {condition} LIMIT {SWEPT_AT_ONCE}"
            query = f"DELETE FROM {table} WHERE id IN ({some}) RETURNING id"
            num_gone = SWEPT_AT_ONCE
            while num_gone == SWEPT_AT_ONCE:
                gone = await self._store.run(partial(_delete, query=query, when=when), frees=True)
                num_gone = len(gone)
                if table == "files":
                    await self._remove(gone)

    async def _remove(self, file_ids: Sequence[str]) -> None:
        """Remove contents that no row names any more; what cannot be removed now is at the next start."""

        def work(_: Connection) -> None:
            for file_id in file_ids:
                self._store.content(file_id).unlink(missing_ok=True)
            self._store.reserve()

        with suppress(RequestError):
            await self._store.run(work, frees=True)


def insert_file(connection: Connection, owner: str, file: FileObject) -> None:
    """Add a row; its content must be in its place when the transaction ends."""
    row = (file.id, owner, file.purpose, file.filename, file.bytes, file.created_at, file.expires_at)
    connection.execute(f"INSERT INTO files ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def find_file(connection: Connection, owner: str, file_id: str) -> FileObject:
    """Raises RequestError (404) for a file that is not there, or another owner's."""
    row = connection.execute(f"SELECT {COLUMNS} FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
    if row is None:
        raise RequestError(f"there is no file '{file_id[:100]}'", status=404, code="file_not_found")
    return _file(row)


def _delete(connection: Connection, *, query: str, when: int) -> list[str]:
    return [row_id for (row_id,) in connection.execute(query, (when,)).fetchall()]


def _file(row: tuple[str, str, str, str, int, int, int | None]) -> FileObject:
    file_id, _, purpose, filename, num_bytes, created_at, expires_at = row
    return FileObject(
        id=file_id, bytes=num_bytes, created_at=created_at, expires_at=expires_at, filename=filename, purpose=purpose
    )
