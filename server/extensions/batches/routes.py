"""/v1/batches: many requests in a file, answered in a file.

Owns: the routes of batches.  Does not know: how their lines run.
"""

import uuid
from collections.abc import Collection

from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError
from server.clients import CLIENT
from server.extensions.batches.objects import BatchBody, BatchObject
from server.extensions.batches.runner import BatchRunner
from server.extensions.batches.table import BatchTable
from server.extensions.storage.pages import Asked, ListPage
from server.extensions.storage.routes import owner_of, refuse_storage
from server.http.body import BodyReader
from server.http.exchange import refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply

BATCHES = "/v1/batches"
ONE = BATCHES + "/{id}"
WINDOW_S = 24 * 3600
LISTED, MAX_LISTED = 20, 100


class BatchRoutes:
    """Handles all of them.  endpoints: which may be named."""

    def __init__(
        self, table: BatchTable, runner: BatchRunner, endpoints: Collection[str], server: ServerSection
    ) -> None:
        self._table = table
        self._runner = runner
        self._endpoints = endpoints
        self._reader = BodyReader(BatchBody, self._check, server)

    @operation(
        "POST",
        BATCHES,
        "client",
        "Answer the requests of a file.",
        answer=BatchObject,
        body=BatchBody,
        off=refuse_storage,
    )
    async def create(self, request: web.Request) -> web.Response:
        """Begin a batch.  Raises RequestError: 400, 404, 429 or 507."""
        request[CLIENT].admit()
        body = await self._reader.read(request)
        now = self._table.now()
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        await self._table.add(owner_of(request), batch)
        self._runner.begin(batch.id)
        return json_reply(batch)

    @operation("GET", BATCHES, "client", "The client's batches.", answer=ListPage, off=refuse_storage)
    async def all(self, request: web.Request) -> web.Response:
        """List the client's batches.  Raises RequestError: 400."""
        asked = Asked.by(request.query, default=LISTED, most=MAX_LISTED)
        return json_reply(await self._table.listed(owner_of(request), asked))

    @operation("GET", ONE, "client", "How far a batch is.", answer=BatchObject, off=refuse_storage)
    async def get(self, request: web.Request) -> web.Response:
        """Return one.  Raises RequestError: 404."""
        return json_reply(await self._table.get(owner_of(request), request.match_info["id"]))

    @operation("POST", ONE + "/cancel", "client", "Run no more of a batch.", answer=BatchObject, off=refuse_storage)
    async def cancel(self, request: web.Request) -> web.Response:
        """Run no more of a batch; what was answered stays.  Raises RequestError: 403, 404, 409."""
        refuse_foreign_page(request)
        batch = await self._table.cancel(owner_of(request), request.match_info["id"])
        self._runner.cancelled(batch.id)
        return json_reply(batch)

    def _check(self, body: BatchBody) -> BatchBody:
        if body.endpoint not in self._endpoints:
            names = ", ".join(sorted(self._endpoints))
            raise FieldError("endpoint", f"must be one of those that this model serves: {names}")
        return body
