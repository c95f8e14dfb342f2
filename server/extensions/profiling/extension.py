"""Profiles of steps as a part of the server."""

from server.extensions.profiling.route import ProfileRoutes
from server.run.extension import Extension, ServerParts


class ProfilingExtension(Extension):
    """POST /start_profile and /stop_profile."""

    handlers = (ProfileRoutes,)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(ProfileRoutes(parts.backend.monitor, parts.server))


EXTENSION = ProfilingExtension()
