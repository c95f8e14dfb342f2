"""Cross-origin requests: which web pages may call this server from a browser.

Owns: the headers that tell browsers so.  Does not know: keys, routes' meaning.
Off unless configured: then a browser refuses pages of other sites by itself, since a request that does anything carries
JSON, about which it must ask first.  A route that acts without a body refuses them with ``refuse_foreign_page``.
"""

from collections.abc import Sequence

from aiohttp import hdrs, web

from engine.errors import RequestError
from server.http.exchange import EXCHANGE

ANY = "*"
METHODS = "GET, POST, OPTIONS"
HEADERS = "Authorization, Content-Type, X-Request-Id"
MAX_AGE_S = 600
OWN_PAGES = frozenset({"none", "same-origin"})  # of Sec-Fetch-Site; 'none' is what a user typed


class Cors:
    """Decides what browsers are told.  origins: exactly as browsers send them, or '*' for any."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Returns the headers that a response needs so that the page may read it."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._origins & {origin, ANY}:
            return {}
        # Keys travel in a header and never in a cookie, so no page can use a visitor's.
        return {
            hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin,
            hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "X-Request-Id, Retry-After",
            hdrs.VARY: hdrs.ORIGIN,
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Returns the answer to a browser that asks before it sends something; None if this is no such question."""
        if request.method != hdrs.METH_OPTIONS or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        if not self.headers(request):
            return None
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: HEADERS,
                hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
            },
        )


def refuse_foreign_page(request: web.Request) -> None:
    """Raise RequestError (403) for a browser on a page of another site, unless ``server.cors_origins`` names it.

    A browser sends a request without a body of JSON before it asks whether it may, and says where it comes from."""
    if request.headers.get("Sec-Fetch-Site", "none") not in OWN_PAGES and not request[EXCHANGE].cors:
        raise RequestError(
            "a page of another site may not ask for this; name its origin in server.cors_origins",
            status=403,
            code="foreign_page",
        )
