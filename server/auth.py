"""The API key.

Owns: which routes are open without it, and the comparison.  Does not know: where the key comes from.
"""

import hmac

from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.errors import RequestError
from server.exchange import Handler

OPEN_ROUTES = frozenset({"/health", "/ready"})  # asked by orchestrators, which have no key


def require_key(api_key: str) -> Middleware:
    """A middleware that lets nothing but the open routes through without ``api_key``.

    It looks at the route that was matched, never at the URL: what is not matched is closed as well.
    """
    expected = api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_ROUTES:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = key.strip().encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, expected):
                raise RequestError("a valid API key is required", status=401, code="invalid_api_key")
        return await handler(request)

    return check
