"""Explanations of requests as a part of the server."""

from server.extensions.explain.explanation import ExplainRoute
from server.run.extension import Extension, ServerParts


class ExplainExtension(Extension):
    """GET /explain/{id}."""

    handlers = (ExplainRoute,)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(ExplainRoute(parts.backend, parts.clients))


EXTENSION = ExplainExtension()
