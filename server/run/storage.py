"""Puts together what needs a store: files, batches, and responses that stay.

Owns: which parts there are, their start and their end.  Does not know: what they do.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.backend import Backend
from server.clients import Clients
from server.extensions.batches.routes import BatchRoutes
from server.extensions.batches.runner import BatchRunner
from server.extensions.batches.table import BatchTable
from server.extensions.responses.stored import RESPONSES, StoredResponses
from server.extensions.responses.table import ResponseTable
from server.extensions.storage.files import HOUR_S, Files
from server.extensions.storage.pace import Pace
from server.extensions.storage.routes import FileRoutes
from server.extensions.storage.store import Store
from server.generate.route import GenerateRoute
from server.keys import Keys

log = logging.getLogger(__name__)

IN_BATCHES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})


class Unattended(NamedTuple):
    """What work needs that no connection waits for."""

    server: ServerSection
    backend: Backend
    clients: Clients
    keys: Keys


def add_storage(
    app: web.Application, store: Store, served: Mapping[str, GenerateRoute[Any]], work: Unattended
) -> frozenset[str]:
    """Add the routes, and the work of while the application runs.  Returns which of ``served`` have theirs."""
    server, backend, clients, keys = work
    files = Files(store)
    table = BatchTable(store, files)
    routes = {path: route for path, route in served.items() if path in IN_BATCHES}
    pace = Pace(backend, clients)
    runner = BatchRunner(table, routes, clients, keys, server, pace)
    app.add_routes([*FileRoutes(store, server).routes, *BatchRoutes(table, runner, routes, server).routes])
    responses = None
    if RESPONSES in served:
        responses = StoredResponses(ResponseTable(store), served[RESPONSES], clients, keys, server, pace)
        app.add_routes(responses.routes)

    async def sweep() -> None:
        while True:
            try:
                await files.sweep()
            except RequestError as error:
                log.error("storage: what has expired is still there, and goes within an hour if it can: %s", error)
            await asyncio.sleep(HOUR_S)

    async def live(app: web.Application) -> AsyncIterator[None]:
        await runner.start()
        if responses is not None:
            await responses.start()
        sweeping = asyncio.create_task(sweep(), name="storage-sweep")
        yield
        sweeping.cancel()
        await runner.stop()
        if responses is not None:
            await responses.stop()
        await asyncio.to_thread(store.close)

    app.cleanup_ctx.append(live)
    return frozenset() if responses is None else frozenset({RESPONSES})
