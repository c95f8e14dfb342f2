"""API keys.

Owns: which routes are open without one, and the comparison.  Does not know: where keys come from.
"""

import hmac
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.errors import RequestError
from server.http.exchange import EXCHANGE, Handler

# Asked by orchestrators, which have no key.
OPEN_ROUTES = frozenset({"/health", "/ready"})


def key_list(api_key: str | Sequence[str]) -> list[str]:
    """Returns the configured keys; none for no protection."""
    return [api_key] if isinstance(api_key, str) and api_key else [key for key in api_key if key]


def require_key(api_key: str | Sequence[str], open_routes: frozenset[str] = OPEN_ROUTES) -> Middleware:
    """Returns a middleware that lets only the open routes through without one of the keys, and notes which it was.

    It looks at the route that was matched, never at the URL: what is not matched is closed as well.
    """
    expected = [key.encode() for key in key_list(api_key)]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in open_routes:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = key.strip().encode("utf-8", "surrogateescape")
            # All of them, whichever it is: the time says neither how much of a key was right nor which one.
            matches = [hmac.compare_digest(given, one) for one in expected]
            if scheme.lower() != "bearer" or not any(matches):
                raise RequestError("a valid API key is required", status=401, code="invalid_api_key")
            request[EXCHANGE].key_number = matches.index(True)
        return await handler(request)

    return check
