"""Stored responses as a part of the server."""

from collections.abc import AsyncIterator

from aiohttp import web

from server.extensions.responses.endpoint import Responses
from server.extensions.storage.pace import PACE
from server.extensions.storage.store import STORE
from server.extensions.stored_responses.stored import StoredResponses
from server.extensions.stored_responses.table import ResponseTable
from server.run.extension import Extension, ServerParts


class StoredResponsesExtension(Extension):
    """Responses that stay, and responses in the background, where there is a store."""

    handlers = (StoredResponses,)

    def join(self, parts: ServerParts) -> None:
        store, route = parts.app.get(STORE), parts.served.get(Responses.operation.path)
        if store is None or route is None:
            return
        table = ResponseTable(store)
        responses = StoredResponses(table, route, parts.clients, parts.keys, parts.server, parts.app[PACE])
        parts.routes.add(responses)
        parts.routes.handle(Responses.operation, responses.post)

        async def live(app: web.Application) -> AsyncIterator[None]:
            await responses.start()
            yield
            await responses.stop()

        parts.app.cleanup_ctx.append(live)


EXTENSION = StoredResponsesExtension()
