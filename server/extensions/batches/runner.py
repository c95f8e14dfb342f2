"""The work of batches: from the check of their lines to the files that they end with.

Owns: a task for each batch that has not ended, which seeds lines have.  Does not know: tables, HTTP.
A line that has been answered is stored at once.  Whatever ends the process, the next one goes on with the lines that
have no answer, and gives them the seeds and names that they had: these follow from the batch and the line's number.
"""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from engine.settings.sections import ServerSection
from engine.types.errors import CallboardError, RequestError
from engine.types.params import MAX_SEED
from server.clients import ClientRequest, Clients
from server.extensions.batches.lines import FoundLine
from server.extensions.batches.objects import BatchObject, InputLine, LineResponse, OutputLine, Status
from server.extensions.batches.table import OK, BatchTable
from server.extensions.storage.pace import Pace
from server.extensions.storage.store import TRY_AGAIN_S
from server.extensions.storage.unattended import ACCOUNT, unhurried, until_taken
from server.generate.generation import ResumePoint
from server.generate.route import GenerateRoute
from server.http.exchange import Exchange
from server.http.replies import as_request_error, error_body
from server.keys import KeyRevoked, Keys

log = logging.getLogger(__name__)

LINES_AHEAD = 512  # of a batch that wait for room


class BatchRunner:
    """Runs them.  routes: endpoint -> what answers it."""

    def __init__(
        self,
        table: BatchTable,
        routes: Mapping[str, GenerateRoute[Any]],
        clients: Clients,
        keys: Keys,
        server: ServerSection,
        pace: Pace,
    ) -> None:
        self._table = table
        self._routes = routes
        self._clients = clients
        self._keys = keys
        self._server = server
        self._pace = pace
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lines: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on with what an earlier process has left."""
        await self._table.forget_lines()  # of batches that have ended
        for batch_id in await self._table.active():
            self.begin(batch_id)

    def begin(self, batch_id: str) -> None:
        """Carry a batch to its end."""
        task = self._tasks[batch_id] = asyncio.create_task(self._carry(batch_id), name=batch_id)
        task.add_done_callback(partial(self._ended, batch_id))

    def cancelled(self, batch_id: str) -> None:
        """Run no more of a batch, as its table says."""
        if (lines := self._lines.get(batch_id)) is not None:
            lines.cancel()

    async def stop(self) -> None:
        """Leave everything as it is stored."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, batch_id: str, task: "asyncio.Task[None]") -> None:
        del self._tasks[batch_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s stands still until the next start", batch_id, exc_info=error)

    async def _carry(self, batch_id: str) -> None:
        entry = await self._table.entry(batch_id)
        batch = entry.batch
        while batch.status == "validating":
            try:
                batch = await self._table.validate(entry.owner, batch, self._server.max_body_bytes)
            except RequestError as error:
                log.error("%s cannot be read: %s", batch_id, error)
                if error.status < 500:
                    await self._table.blame(batch_id, error)
                    batch = await self._table.move(batch_id, "finalizing", "validating")
                    break
                await asyncio.sleep(TRY_AGAIN_S)
        if batch.status == "in_progress":
            await self._run(entry.owner, batch)
            batch = (await self._table.entry(batch_id)).batch
        if batch.status == "in_progress":
            batch = await self._table.move(batch_id, "finalizing", "in_progress")
        if batch.status == "finalizing":
            counts = batch.request_counts
            is_whole = counts.total > 0 and counts.completed + counts.failed == counts.total
            is_late = self._table.now() >= batch.expires_at and batch.errors is None
            await self._end(batch, "completed" if is_whole else "expired" if is_late else "failed")
        elif batch.status == "cancelling":
            await self._end(batch, "cancelled")
        log.info("%s has ended", batch_id)

    async def _end(self, batch: BatchObject, ending: Status) -> None:
        await self._table.end(batch.id, ending, lambda number: _line_name(_origin(batch, number)))

    async def _run(self, owner: str, batch: BatchObject) -> None:
        """Run what has no answer yet, until there is none, or the batch is cancelled or expires."""
        lines = self._lines[batch.id] = asyncio.create_task(self._run_lines(owner, batch), name=f"{batch.id} lines")
        try:
            if (await self._table.entry(batch.id)).batch.status == "in_progress":
                await asyncio.wait({lines}, timeout=max(0, batch.expires_at - self._table.now()))
        finally:
            del self._lines[batch.id]
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)
        if not lines.cancelled():
            lines.result()

    async def _run_lines(self, owner: str, batch: BatchObject) -> None:
        after, room = 0, asyncio.Semaphore(LINES_AHEAD)
        try:
            async with asyncio.TaskGroup() as group:
                while found := await self._table.pending(batch.id, after, LINES_AHEAD):
                    for line in found:
                        await room.acquire()
                        task = group.create_task(self._line(owner, batch, line), name=f"{batch.id} {line.number}")
                        task.add_done_callback(lambda _: room.release())
                        after = line.number
        except* KeyRevoked:
            revoked = "the API key that the batch belongs to is no longer valid"
            await self._table.blame(batch.id, RequestError(revoked, code="key_revoked"))
        except* RequestError as failed:  # an answer could not be stored
            await self._table.blame(batch.id, as_request_error(failed.exceptions[0]))

    async def _line(self, owner: str, batch: BatchObject, line: FoundLine) -> None:
        origin = _origin(batch, line.number)
        exchange = Exchange(name=f"req-{origin.key.hex}", address="batch")
        status, body = OK, b""
        try:
            data = await self._table.body(batch, line)
            asked = bytes(msgspec.json.decode(data, type=InputLine).body)
            answer = await until_taken(partial(self._attempt, exchange, owner, batch.endpoint, asked, origin))
            body = msgspec.json.encode(answer)
        except KeyRevoked:
            raise
        except Exception as error:
            if not isinstance(error, CallboardError):
                log.exception("request=%s failed", exchange.id)
            refusal = as_request_error(error)
            status, body = refusal.status, msgspec.json.encode(error_body(refusal))
        response = LineResponse(status, exchange.id, msgspec.Raw(body))
        output = OutputLine(id=_line_name(origin), custom_id=line.custom_id, response=response)
        await self._table.answered(owner, batch.id, line.number, status, msgspec.json.encode(output))

    async def _attempt(self, exchange: Exchange, owner: str, endpoint: str, body: bytes, origin: ResumePoint) -> object:
        route = self._routes[endpoint]

        def new_client() -> ClientRequest:
            exchange.key = self._keys.of_owner(owner, "batch")  # of now: a line may have waited long for its turn
            return self._clients.request(exchange, ACCOUNT.format(client=exchange.client))

        return await self._pace.run(
            owner, new_client, lambda client: route.answer(client, body, partial(unhurried, origin))
        )


def _origin(batch: BatchObject, number: int) -> ResumePoint:
    """Returns what a line's answer is named and drawn by, the same whenever it runs."""
    digest = hashlib.blake2b(f"{batch.id} {number}".encode(), digest_size=24).digest()
    seed = int.from_bytes(digest[16:], "little") & MAX_SEED
    return ResumePoint(key=uuid.UUID(bytes=digest[:16]), created=batch.created_at, seed=seed)


def _line_name(origin: ResumePoint) -> str:
    return f"batch_req_{origin.key.hex}"
