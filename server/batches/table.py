"""The tables of batches and of their lines.

Owns: how a batch and its lines change, each change whole or not at all.  Does not know: HTTP, the engine.
"""

from collections.abc import Callable, Sequence
from typing import BinaryIO

import msgspec
from msgspec import structs

from engine.errors import RequestError
from server.batches.lines import FoundLine, LineReader
from server.batches.objects import BatchObject, LineError, LineErrors, LineFailure, OutputLine, RequestCounts, Status
from server.generate.unattended import check_active
from server.storage.files import FileObject, Files, find_file, insert_file
from server.storage.pages import Asked, ListPage
from server.storage.store import PART, Connection, Store

COLUMNS = "id, owner, status, total, completed, failed, body"
ACTIVE: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
LINES_AT_ONCE = 1000  # of a transaction, so that others come between
OK = 200
NOT_RUN = {
    "expired": ("batch_expired", "the line was not run within the batch's completion window"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the line had run"),
    "failed": ("batch_failed", "the batch failed before the line had run"),
}


class Entry(msgspec.Struct, frozen=True):
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
        """Raises RequestError: 400 for a file that is no input, 404 for none, 429 for too many batches."""

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

    async def entry(self, batch_id: str) -> Entry:
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

        await self._store.insist(work)

    async def validate(self, batch: BatchObject, max_body_bytes: int) -> BatchObject:
        """Read the input and note its lines; returns the batch, in progress or failed, or cancelled meanwhile."""
        path = self._store.content(batch.input_file_id)
        reader = LineReader(path, batch.endpoint, max_body_bytes)

        def begin(connection: Connection) -> None:
            connection.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))

        def read(connection: Connection) -> None:
            _insert(connection, batch.id, reader, reader.read(LINES_AT_ONCE))

        def end(connection: Connection) -> BatchObject:
            now = _find(connection, batch.id).batch
            if now.status != "validating":
                return now
            if not reader.num_lines and not reader.errors:
                reader.wrong("empty_file", "the file has no lines", None)
            if reader.errors:
                begin(connection)
                now = structs.replace(now, errors=LineErrors(reader.errors))
                return _change(connection, now, "failed", self.now())
            connection.execute("UPDATE batches SET total = ? WHERE id = ?", (reader.num_lines, batch.id))
            return _change(connection, now, "in_progress", self.now())

        await self._store.insist(begin)
        while not reader.at_end:
            # Not tried again: the reader has moved on.  A disk that fails here makes the whole of it begin anew.
            await self._store.run(read)
        return await self._store.insist(end)

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

    async def answered(self, batch_id: str, number: int, status: int, answer: bytes) -> None:
        """Store the answer to a line, unless it has one."""

        def work(connection: Connection) -> None:
            changed = connection.execute(
                "UPDATE lines SET status = ?, answer = ? WHERE batch = ? AND number = ? AND status IS NULL",
                (status, answer, batch_id, number),
            ).rowcount
            column = "completed" if status == OK else "failed"
            connection.execute(f"UPDATE batches SET {column} = {column} + ? WHERE id = ?", (changed, batch_id))

        await self._store.insist(work)

    async def end(self, batch_id: str, ending: Status, name_line: Callable[[int], str]) -> None:
        """Write a batch's files and give it its last status.  name_line: the id of an output line by its number."""
        owner, batch = structs.astuple(await self.entry(batch_id))
        await self._store.insist(lambda connection: self._end(connection, owner, batch, ending, name_line))

    def _end(
        self, connection: Connection, owner: str, batch: BatchObject, ending: Status, name_line: Callable[[int], str]
    ) -> None:
        now = self.now()
        code, message = NOT_RUN.get(ending, NOT_RUN["failed"])
        not_run = LineFailure(code, message)

        def lines(condition: str) -> "Sequence[bytes] | map[bytes]":
            rows = connection.execute(
                f"SELECT number, custom_id, answer FROM lines WHERE batch = ? AND {condition} ORDER BY number",
                (batch.id,),
            )
            return map(rendered, rows)

        def rendered(row: tuple[int, str, bytes | None]) -> bytes:
            number, custom_id, answer = row
            if answer is not None:
                return answer
            return msgspec.json.encode(OutputLine(id=name_line(number), custom_id=custom_id, error=not_run))

        output = self._write(connection, owner, batch, "output", lines(f"status = {OK}"), now)
        errors = self._write(connection, owner, batch, "error", lines(f"status IS NOT {OK}"), now)
        connection.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        batch = structs.replace(batch, output_file_id=output, error_file_id=errors)
        _change(connection, batch, ending, now)

    def _write(
        self,
        connection: Connection,
        owner: str,
        batch: BatchObject,
        kind: str,
        lines: "Sequence[bytes] | map[bytes]",
        now: int,
    ) -> str | None:
        """Write a file of lines; returns its id, or None if there are none."""
        # Always the same name, so that an attempt that a crash has ended is written over.
        file_id = f"file-{kind}-{batch.id.removeprefix('batch_')}"
        part = self._store.content(file_id + PART)
        try:
            with part.open("wb") as file:
                num_bytes = _write_lines(file, lines)
                if num_bytes:
                    self._store.sync(file)
            if not num_bytes:
                return None
            insert_file(
                connection,
                owner,
                FileObject(
                    id=file_id,
                    bytes=num_bytes,
                    created_at=now,
                    expires_at=self._files.expiry(now),
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output",
                ),
            )
            self._store.place(part, file_id)
            return file_id
        finally:
            part.unlink(missing_ok=True)


def _write_lines(file: BinaryIO, lines: "Sequence[bytes] | map[bytes]") -> int:
    return sum(file.write(line + b"\n") for line in lines)


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


def _find(connection: Connection, batch_id: str, owner: str | None = None) -> Entry:
    """Raises RequestError (404) for a batch that is not there, or not ``owner``'s."""
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE id = ? AND (? IS NULL OR owner = ?)", (batch_id, owner, owner)
    ).fetchone()
    if row is None:
        raise RequestError(f"there is no batch '{batch_id[:100]}'", status=404, code="batch_not_found")
    return _entry(row)


def _entry(row: tuple[str, str, Status, int, int, int, bytes]) -> Entry:
    _, owner, status, total, completed, failed, body = row
    batch = msgspec.json.decode(body, type=BatchObject)
    return Entry(owner, structs.replace(batch, status=status, request_counts=RequestCounts(total, completed, failed)))


def _change(connection: Connection, batch: BatchObject, status: Status, now: int) -> BatchObject:
    """Give a batch a status, and note when."""
    batch = structs.replace(batch, status=status, **{f"{status}_at": now})
    row = (status, msgspec.json.encode(batch), batch.id)
    connection.execute("UPDATE batches SET status = ?, body = ? WHERE id = ?", row)
    return batch
