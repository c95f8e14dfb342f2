"""/v1/batches: many requests in a file, answered in a file.

Owns: the routes of batches.  Does not know: how their lines run.
"""

import uuid
from collections.abc import Collection

from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError
from server.access import access
from server.batches.objects import BatchBody, BatchObject
from server.batches.runner import BatchRunner
from server.batches.table import BatchTable
from server.clients import CLIENT
from server.http.body import BodyReader
from server.http.exchange import refuse_foreign_page
from server.http.replies import json_reply
from server.storage.pages import Asked
from server.storage.routes import BATCHES, owner_of

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

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes, for an application."""
        one = BATCHES + "/{id}"
        return [
            web.post(BATCHES, self.create),
            web.get(BATCHES, self.all),
            web.get(one, self.get),
            web.post(one + "/cancel", self.cancel),
        ]

    @access("client")
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

    @access("client")
    async def all(self, request: web.Request) -> web.Response:
        """Tell of the client's batches.  Raises RequestError: 400."""
        asked = Asked.by(request.query, default=LISTED, most=MAX_LISTED)
        return json_reply(await self._table.listed(owner_of(request), asked))

    @access("client")
    async def get(self, request: web.Request) -> web.Response:
        """Tell of one.  Raises RequestError: 404."""
        return json_reply(await self._table.get(owner_of(request), request.match_info["id"]))

    @access("client")
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
