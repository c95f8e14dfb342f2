"""The routes of weight updates as a part of the server."""

from server.extensions.weight_updates.routes import WeightRoutes
from server.run.extension import Extension, ServerParts


class WeightUpdatesExtension(Extension):
    """POST /update_weights, /pause and /resume, GET /weight_version."""

    handlers = (WeightRoutes,)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(WeightRoutes(parts.backend.operations, parts.server))


EXTENSION = WeightUpdatesExtension()
