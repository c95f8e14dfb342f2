"""The load of the engine as a part of the server."""

from server.extensions.loads.route import LoadsRoute
from server.run.extension import Extension, ServerParts


class LoadsExtension(Extension):
    """GET /v1/loads."""

    handlers = (LoadsRoute,)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(LoadsRoute(parts.backend.monitor, parts.version))


EXTENSION = LoadsExtension()
