"""One request and its response, as the log tells of them and middlewares know them.

Owns: the request id and what the access log line says.  Does not know: bodies, the engine.
"""

import logging
import string
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from engine.logs import FIELDS

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
MAX_REQUEST_ID_CHARS = 128
PRINTABLE = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")
# Asked every second: no news while all is well.
WATCHED = frozenset({"/health", "/ready", "/metrics", "/stats", "/load"})
CLIENT_LEFT = 499  # what nginx logs for a client that left before the response


class Exchange:
    """What is known of a request besides its body.

    id: the client's own if it sent a usable one.  route: the path's pattern, once one was matched.
    names: what else the client may call it by.  usage: prompt and completion tokens.  Handlers that generate set both.
    key_number: which of the API keys it brought, where there are any.  cors: what a browser must be told."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.id = _request_id(request.headers.get(REQUEST_ID_HEADER, ""))
        self.route = "-"
        self.usage: tuple[int, int] | None = None
        self.names: set[str] = set()
        self.key_number: int | None = None
        self.cors: dict[str, str] = {}

    @property
    def headers(self) -> dict[str, str]:
        """What every response carries.  The server is named without versions, which only help an attacker."""
        return {REQUEST_ID_HEADER: self.id, "Server": "callboard", **self.cors}

    def log(self, request: web.BaseRequest, status: int, duration_s: float) -> None:
        """One line per request.  The route is logged, not the path, which is the client's to choose."""
        prompt_tokens, completion_tokens = self.usage or (0, 0)
        fields = {
            "request": self.id,
            "method": request.method,
            "route": self.route,
            "status": status,
            "duration_ms": round(duration_s * 1e3, 1),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
        log.log(
            logging.DEBUG if self.route in WATCHED and status < HTTPStatus.BAD_REQUEST else logging.INFO,
            "request=%(request)s %(method)s %(route)s status=%(status)d duration_ms=%(duration_ms).1f "
            "prompt_tokens=%(prompt_tokens)d completion_tokens=%(completion_tokens)d",
            fields,
            extra={FIELDS: fields},
        )


EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def note_route(request: web.Request, handler: Handler) -> web.StreamResponse:
    """aiohttp runs this after matching, also when nothing matched."""
    resource = request.match_info.route.resource
    if resource is not None:
        request[EXCHANGE].route = resource.canonical
    return await handler(request)


def _request_id(offered: str) -> str:
    usable = 1 <= len(offered) <= MAX_REQUEST_ID_CHARS and PRINTABLE.issuperset(offered)
    return offered if usable else f"req-{uuid.uuid4().hex}"
