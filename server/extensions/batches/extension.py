"""Batches as a part of the server."""

from collections.abc import AsyncIterator

from aiohttp import web

from server.extensions.batches.routes import BatchRoutes
from server.extensions.batches.runner import BatchRunner
from server.extensions.batches.table import BatchTable
from server.extensions.storage.files import Files
from server.extensions.storage.pace import PACE
from server.extensions.storage.store import STORE
from server.run.extension import Extension, ServerParts


class BatchesExtension(Extension):
    """/v1/batches, where there is a store."""

    handlers = (BatchRoutes,)

    def join(self, parts: ServerParts) -> None:
        if (store := parts.app.get(STORE)) is None:
            return
        table = BatchTable(store, Files(store))
        routes = {path: route for path, route in parts.served.items() if route.endpoint.operation.in_batches}
        runner = BatchRunner(table, routes, parts.clients, parts.keys, parts.server, parts.app[PACE])
        parts.routes.add(BatchRoutes(table, runner, routes, parts.server))

        async def live(app: web.Application) -> AsyncIterator[None]:
            await runner.start()
            yield
            await runner.stop()

        parts.app.cleanup_ctx.append(live)


EXTENSION = BatchesExtension()
