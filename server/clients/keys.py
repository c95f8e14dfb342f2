"""API keys: which routes need one, and what keeps the cached prefixes of different keys apart.

Owns: the comparison of keys, a salt for each.  Does not know: where keys come from, requests, the cache.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.errors import RequestError
from engine.sections import ServerSection
from server.http.exchange import EXCHANGE, Handler

SALT_CHARS = 32
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


class CacheSalts:
    """The salt of each key.  keep: called with all of them when one has changed, as bytes.

    kept: what an earlier process of the same configuration gave to ``keep``, if there was one."""

    def __init__(
        self, server: ServerSection, *, kept: bytes = b"", keep: Callable[[bytes], None] | None = None
    ) -> None:
        # Not the keys themselves: a salt may show up in a log one day.  With one key all clients are one.
        keys = key_list(server.api_key)
        self._share = server.shared_cache or len(keys) < 2
        self._salts = [""] if self._share else [hashlib.sha256(key.encode()).hexdigest()[:SALT_CHARS] for key in keys]
        if kept:
            self._salts = msgspec.msgpack.decode(kept, type=list[str])
        self._keep = keep

    def of(self, key_number: int | None) -> str:
        """Returns the salt of a client with this key."""
        return self._salts[self._sharers(key_number)]

    def renew(self, key_number: int | None) -> None:
        """Change the salt of a client, and of those it shares it with: nothing is found any more that was cached."""
        self._salts[self._sharers(key_number)] = secrets.token_hex(SALT_CHARS // 2)
        if self._keep is not None:
            self._keep(msgspec.msgpack.encode(self._salts))

    def _sharers(self, key_number: int | None) -> int:
        """Returns the index of the salt that a client has, maybe together with others."""
        return 0 if self._share or key_number is None else key_number
