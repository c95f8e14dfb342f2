"""Sessions as a part of the server."""

from typing import TYPE_CHECKING

from engine.features.sessions.holdings import SessionHoldings
from engine.features.sessions.planner import NAME, session_part
from engine.types.prompt import RequestPart
from server.extensions.sessions.route import SessionsRoute
from server.run.extension import Extension, ServerParts

if TYPE_CHECKING:
    from engine.control.system import System


class SessionsExtension(Extension):
    """GET /sessions, and the sessions that requests name."""

    handlers = (SessionsRoute,)

    def with_engine(self, system: "System") -> None:
        system.watchers[NAME] = SessionHoldings()

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(SessionsRoute(parts.backend.monitor, parts.clients))
        parts.translator.session_parts = session_parts
        for route in parts.served.values():
            route.session_parts = session_parts


def session_parts(name: str, ttl_s: float = 0.0) -> dict[str, RequestPart]:
    """Returns the parts of a request that belongs to a session."""
    return {NAME: session_part(name, ttl_s)}


EXTENSION = SessionsExtension()
