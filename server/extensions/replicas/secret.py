"""The secret of a fleet: a router sends it with all that it asks of replicas, and they take nothing without.

Owns: the secret, its header, what replicas hold requests to; keys as replicas are given them.
Does not know: how replicas are started.  They get the secret's digest alone, and the digests of keys: what places them
on other machines keeps what they are given, where others may read it.
"""

import hashlib
import hmac
import secrets

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.http.operation import Handler
from server.keys import HASH

HEADER = "X-Callboard-Fleet"
SECRET_BYTES = 32


class FleetSecret:
    """The secret that a router and its replicas share: drawn, or made of a key that all routers of a fleet have.

    headers: sent with each request to a replica.  digest: the form in which a replica keeps it."""

    def __init__(self, key: str = "", fleet: str = "") -> None:
        drawn = secrets.token_hex(SECRET_BYTES)
        secret = hmac.digest(key.encode(), b"fleet/" + fleet.encode(), "sha256").hex() if key else drawn
        self.headers = {HEADER: secret}
        self.digest = _digest(secret)


def require_secret(digest: str) -> Middleware:
    """Returns a middleware that lets nothing through without the secret of this digest."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not hmac.compare_digest(_digest(request.headers.get(HEADER, "")), digest):
            raise RequestError(
                "this is a replica, which answers its router alone", status=403, code="replicas_router_only"
            )
        return await handler(request)

    return check


def with_hashed_keys(server: ServerSection) -> ServerSection:
    """Return the section with digests in place of keys; a digest admits the key that it is made of."""
    given = [server.api_key] if isinstance(server.api_key, str) else server.api_key
    return msgspec.structs.replace(
        server, api_key=[_hashed(key) for key in given if key], operator_key=_hashed(server.operator_key)
    )


def _hashed(key: str) -> str:
    return f"{HASH}{_digest(key)}" if key and not key.startswith(HASH) else key


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
