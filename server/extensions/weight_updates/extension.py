"""The routes of weight updates, and the socket for them, as a part of the server."""

from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from server.extensions.weight_updates.engine_weights import EngineWeights
from server.extensions.weight_updates.routes import WeightRoutes
from server.extensions.weight_updates.settings import WeightsSocketSettings
from server.extensions.weight_updates.sglang_routes import SGLangRoutes
from server.extensions.weight_updates.socket import WeightsSocket
from server.run.extension import Extension, ServerParts


class WeightUpdatesExtension(Extension):
    """POST /update_weights, /pause and /resume, GET /weight_version, their names elsewhere, and a Unix socket."""

    handlers = (WeightRoutes, SGLangRoutes)

    def join(self, parts: ServerParts) -> None:
        weights = EngineWeights(parts.backend.operations)
        parts.routes.add(WeightRoutes(weights, parts.server))
        parts.routes.add(SGLangRoutes(weights, parts.server, parts.clients))
        if not (path := WeightsSocketSettings.read(parts.server).weights_socket):
            return
        listener = WeightsSocket(Path(path), weights, parts.server.client_timeout_s)

        async def live(app: web.Application) -> AsyncIterator[None]:
            listener.start()
            yield
            await listener.stop()

        parts.app.cleanup_ctx.append(live)


EXTENSION = WeightUpdatesExtension()
