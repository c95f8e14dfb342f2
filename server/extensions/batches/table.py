"""The tables of batches and of their lines.

Owns: how a batch and its lines change, each change whole or not at all.  Does not know: HTTP, the engine.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from engine.types.errors import RequestError
from server.extensions.batches.lines import FoundLine, LineReader
from server.extensions.batches.objects import (
    BatchObject,
    LineError,
    LineErrors,
    LineFailure,
    OutputLine,
    RequestCounts,
    Status,
)
from server.extensions.storage import store
from server.extensions.storage.files import FileObject, Files, find_file, insert_file
from server.extensions.storage.pages import Asked, ListPage
from server.extensions.storage.store import PART, Connection, Store, check_quota, disk_error
from server.extensions.storage.unattended import check_active

log = logging.getLogger(__name__)

COLUMNS = "id, owner, status, total, completed, failed, body"
ACTIVE: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
LINES_AT_ONCE = 1000  # of a transaction, so that others come between
SHARE_BYTES = 1 << 20
OK = 200
WHICH = {"output": f"status = {OK}", "error": f"status IS NOT {OK}"}  # lines of each file
NOT_RUN = {
    "expired": ("batch_expired", "the line was not run within the batch's completion window"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the line had run"),
    "failed": ("batch_failed", "the batch failed before the line had run"),
}


class BatchEntry(msgspec.Struct, frozen=True):
    """A batch as its table has it."""

    owner: str
    batch: BatchObject


class BatchTable:
    """Batches of all owners."""

    def __init__(self, store: Store, files: Files) -> None:
        self._store = store
        self._files = files

    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._store.clock())

    # ---- what clients ask -------------------------------------------------------------------

    async def add(self, owner: str, batch: BatchObject) -> None:
        """Raises RequestError: 400 for a file that is no input and beyond the quota, 404 for none, 429 for too many."""

        def work(connection: Connection) -> None:
            if find_file(connection, owner, batch.input_file_id).purpose != "batch":
                raise RequestError(
                    "input_file_id: this file is the output of a batch; upload one with purpose 'batch'",
                    param="input_file_id",
                )
            marks = ", ".join("?" * len(ACTIVE))
            (num_active,) = connection.execute(
                f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({marks})", (owner, *ACTIVE)
            ).fetchone()
            check_active("batches", num_active)
            connection.execute(
                "INSERT INTO batches (id, owner, status, created_at, input_file_id, body) VALUES (?, ?, ?, ?, ?, ?)",
                (batch.id, owner, batch.status, batch.created_at, batch.input_file_id, msgspec.json.encode(batch)),
            )
            check_quota(connection, self._store.settings, owner)

        await self._store.run(work)

    async def get(self, owner: str, batch_id: str) -> BatchObject:
        """Raises RequestError (404)."""
        return (await self._store.run(lambda connection: _find(connection, batch_id, owner))).batch

    async def listed(self, owner: str, asked: Asked) -> ListPage:
        """Returns a part of an owner's batches."""
        than, order = asked.sql

        def work(connection: Connection) -> ListPage:
            after = _find(connection, asked.after, owner).batch if asked.after else None
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM batches WHERE owner = ? AND (? IS NULL OR (created_at, id) {than} (?, ?))"
                f" ORDER BY created_at {order}, id {order} LIMIT ?",
                (owner, after and after.id, after and after.created_at, after and after.id, asked.limit + 1),
            ).fetchall()
            return asked.page([row[0] for row in rows], [_entry(row).batch for row in rows])

        return await self._store.run(work)

    async def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Note that no more of a batch is wanted.  Raises RequestError: 404, or 409 if it has ended."""

        def work(connection: Connection) -> BatchObject:
            batch = _find(connection, batch_id, owner).batch
            if batch.status not in ACTIVE:
                reason = f"the batch has ended: it is {batch.status}"
                raise RequestError(reason, status=409, code="batch_has_ended")
            if batch.status in ("cancelling", "finalizing"):
                return batch
            return _change(connection, batch, "cancelling", self.now())

        return await self._store.run(work)

    # ---- what its work needs ----------------------------------------------------------------

    async def active(self) -> list[str]:
        """The ids of those that have not ended, the oldest first."""
        marks = ", ".join("?" * len(ACTIVE))
        query = f"SELECT id FROM batches WHERE status IN ({marks}) ORDER BY created_at, id"
        return await self._store.insist(lambda connection: [one for (one,) in connection.execute(query, ACTIVE)])

    async def entry(self, batch_id: str) -> BatchEntry:
        """A batch, whosever it is."""
        return await self._store.insist(lambda connection: _find(connection, batch_id))

    async def move(self, batch_id: str, status: Status, before: Status) -> BatchObject:
        """Give a batch a status, if it still has the one of ``before``; returns how it is now."""

        def work(connection: Connection) -> BatchObject:
            batch = _find(connection, batch_id).batch
            return _change(connection, batch, status, self.now()) if batch.status == before else batch

        return await self._store.insist(work)

    async def blame(self, batch_id: str, error: RequestError) -> None:
        """Note why a batch will fail as a whole."""
        errors = LineErrors([LineError(code=error.code, line=None, message=error.message)])

        def work(connection: Connection) -> None:
            batch = structs.replace(_find(connection, batch_id).batch, errors=errors)
            connection.execute("UPDATE batches SET body = ? WHERE id = ?", (msgspec.json.encode(batch), batch_id))

        await self._store.insist(work, frees=True)

    async def validate(self, owner: str, batch: BatchObject, max_body_bytes: int) -> BatchObject:
        """Read the input and note its lines; returns the batch, in progress or failed, or cancelled meanwhile.

        Raises RequestError: 400 beyond the owner's quota, 503 and 507 for a disk that fails or is full."""
        path = self._store.content(batch.input_file_id)
        reader = LineReader(path, batch.endpoint, max_body_bytes)

        def read(connection: Connection) -> None:
            _insert(connection, batch.id, reader, reader.read(LINES_AT_ONCE))
            check_quota(connection, self._store.settings, owner)

        def end(connection: Connection) -> BatchObject:
            now = _find(connection, batch.id).batch
            if now.status != "validating":
                return now
            if not reader.num_lines and not reader.errors:
                reader.wrong("empty_file", "the file has no lines", None)
            if reader.errors:
                now = structs.replace(now, errors=LineErrors(reader.errors))
                failed = _change(connection, now, "failed", self.now())
                try:
                    check_quota(connection, self._store.settings, owner)
                except RequestError:  # the first of them says what is wrong
                    now = structs.replace(now, errors=LineErrors(reader.errors[:1]))
                    failed = _change(connection, now, "failed", self.now())
                return failed
            connection.execute("UPDATE batches SET total = ? WHERE id = ?", (reader.num_lines, batch.id))
            return _change(connection, now, "in_progress", self.now())

        await self.forget_lines(batch.id)
        while not reader.at_end:
            # Not tried again: the reader has moved on.  A disk that fails here makes the whole of it begin anew.
            await self._store.run(read)
        batch = await self._store.insist(end)
        if batch.status == "failed":
            await self.forget_lines(batch.id)
        return batch

    async def forget_lines(self, batch_id: str | None = None) -> None:
        """Let go of a batch's lines, or of those of all that have ended, share by share."""
        ended = f"batch NOT IN (SELECT id FROM batches WHERE status IN ({', '.join('?' * len(ACTIVE))}))"
        which, given = (ended, [*ACTIVE]) if batch_id is None else ("batch = ?", [batch_id])
        query = f"DELETE FROM lines WHERE rowid IN (SELECT rowid FROM lines WHERE {which} LIMIT {LINES_AT_ONCE})"

        def work(connection: Connection) -> int:
            return connection.execute(query, given).rowcount

        while await self._store.insist(work, frees=True) == LINES_AT_ONCE:
            pass

    async def pending(self, batch_id: str, after: int, count: int) -> list[FoundLine]:
        """The next lines behind number ``after`` that have no answer."""
        query = (
            "SELECT number, custom_id, start, length FROM lines"
            " WHERE batch = ? AND number > ? AND status IS NULL ORDER BY number LIMIT ?"
        )
        return await self._store.insist(
            lambda connection: [FoundLine(*row) for row in connection.execute(query, (batch_id, after, count))]
        )

    async def body(self, batch: BatchObject, line: FoundLine) -> bytes:
        """A line of the input, as it was uploaded."""

        def work(_: Connection) -> bytes:
            with self._store.content(batch.input_file_id).open("rb") as file:
                file.seek(line.start)
                return file.read(line.length)

        return await self._store.insist(work)

    async def answered(self, owner: str, batch_id: str, number: int, status: int, answer: bytes) -> None:
        """Store the answer to a line, unless it has one.

        Raises RequestError: 400 beyond the owner's quota, 503 and 507 for a disk that stays so."""

        def work(connection: Connection) -> None:
            changed = connection.execute(
                "UPDATE lines SET status = ?, answer = ? WHERE batch = ? AND number = ? AND status IS NULL",
                (status, answer, batch_id, number),
            ).rowcount
            column = "completed" if status == OK else "failed"
            connection.execute(f"UPDATE batches SET {column} = {column} + ? WHERE id = ?", (changed, batch_id))
            check_quota(connection, self._store.settings, owner)

        await self._store.insist(work, gives_up=True)

    async def end(self, batch_id: str, ending: Status, name_line: Callable[[int], str]) -> None:
        """Write a batch's files and give it its last status.  name_line: the id of an output line by its number.

        Where the disk stays full, the batch has failed, and has no files."""
        owner, batch = structs.astuple(await self.entry(batch_id))
        for number in itertools.count(1):
            try:
                await self._end(owner, batch, ending, name_line)
                break
            except (OSError, RequestError) as error:
                refusal = error if isinstance(error, RequestError) else disk_error(error)
                if number >= store.MOST_TRIES:
                    await self.blame(batch_id, refusal)
                    await self._store.insist(partial(self._fail, batch_id=batch_id), frees=True)
                    break
                log.error("%s cannot be written: %s; it is tried again", batch_id, refusal)
            await asyncio.sleep(store.TRY_AGAIN_S)
        # What they took counts twice until they are gone, so no check of a quota is above: it has room for either.
        await self.forget_lines(batch_id)

    def _fail(self, connection: Connection, *, batch_id: str) -> None:
        _change(connection, _find(connection, batch_id).batch, "failed", self.now())

    async def _end(self, owner: str, batch: BatchObject, ending: Status, name_line: Callable[[int], str]) -> None:
        now = self.now()
        not_run = LineFailure(*NOT_RUN.get(ending, NOT_RUN["failed"]))

        def rendered(number: int, custom_id: str, answer: bytes | None) -> bytes:
            return answer or msgspec.json.encode(OutputLine(id=name_line(number), custom_id=custom_id, error=not_run))

        # Always the same names, so that an attempt that a crash has ended is written over.
        names = {kind: f"file-{kind}-{batch.id.removeprefix('batch_')}" for kind in WHICH}
        parts = {kind: self._store.content(name + PART) for kind, name in names.items()}

        def finish(connection: Connection) -> None:
            written = {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes}
            for kind, num_bytes in written.items():
                file = FileObject(
                    id=names[kind],
                    bytes=num_bytes,
                    created_at=now,
                    expires_at=self._files.expiry(now),
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output",
                )
                insert_file(connection, owner, file)
                self._store.place(parts[kind], names[kind])
            output, errors = (names[kind] if kind in written else None for kind in WHICH)
            _change(connection, structs.replace(batch, output_file_id=output, error_file_id=errors), ending, now)

        try:
            sizes = {kind: await self._write(batch.id, kind, part, rendered) for kind, part in parts.items()}
            await self._store.run(finish)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)

    async def _write(self, batch_id: str, kind: str, part: Path, rendered: Callable[..., bytes]) -> int:
        """Write a file of lines, share by share; returns its bytes.  Raises RequestError, OSError."""
        query = (
            f"SELECT number, custom_id, answer FROM lines WHERE batch = ? AND number > ? AND {WHICH[kind]}"
            f" ORDER BY number LIMIT {LINES_AT_ONCE}"
        )
        after, num_bytes, at_end = 0, 0, False

        def share(connection: Connection) -> None:
            nonlocal after, num_bytes, at_end
            most = num_bytes + SHARE_BYTES
            for row in connection.execute(query, (batch_id, after)):
                num_bytes += file.write(rendered(*row) + b"\n")
                after = row[0]
                if num_bytes >= most:
                    return
            at_end = connection.execute(query, (batch_id, after)).fetchone() is None

        with part.open("wb") as file:
            while not at_end:
                await self._store.run(share)
            await asyncio.to_thread(self._store.sync, file)
        return num_bytes


def _insert(connection: Connection, batch_id: str, reader: LineReader, lines: Sequence[FoundLine]) -> None:
    for line in lines:
        added = connection.execute(
            "INSERT OR IGNORE INTO lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
            (batch_id, line.number, line.custom_id, line.start, line.length),
        ).rowcount
        if not added:
            (first,) = connection.execute(
                "SELECT number FROM lines WHERE batch = ? AND custom_id = ?", (batch_id, line.custom_id)
            ).fetchone()
            reason = f"custom_id: '{line.custom_id[:100]}' is that of line {first} already"
            reader.wrong("duplicate_custom_id", reason, line.number, "custom_id")


def _find(connection: Connection, batch_id: str, owner: str | None = None) -> BatchEntry:
    """Raises RequestError (404) for a batch that is not there, or not ``owner``'s."""
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE id = ? AND (? IS NULL OR owner = ?)", (batch_id, owner, owner)
    ).fetchone()
    if row is None:
        raise RequestError(f"there is no batch '{batch_id[:100]}'", status=404, code="batch_not_found")
    return _entry(row)


def _entry(row: tuple[str, str, Status, int, int, int, bytes]) -> BatchEntry:
    _, owner, status, total, completed, failed, body = row
    batch = msgspec.json.decode(body, type=BatchObject)
    return BatchEntry(
        owner, structs.replace(batch, status=status, request_counts=RequestCounts(total, completed, failed))
    )


def _change(connection: Connection, batch: BatchObject, status: Status, now: int) -> BatchObject:
    """Give a batch a status, and note when."""
    batch = structs.replace(batch, status=status, **{f"{status}_at": now})
    row = (status, msgspec.json.encode(batch), batch.id)
    connection.execute("UPDATE batches SET status = ?, body = ? WHERE id = ?", row)
    return batch
