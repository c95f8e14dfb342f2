"""Who the clients are: their keys, what each may have open at once, and which cached prefixes it sees.

Owns: the comparison of keys, a salt for each, open requests per client, their names.
Does not know: where keys come from, bodies, routes, what a request costs.
A client is an API key, or an address where there are no keys.  A handler opens requests in the engine through the
``ClientRequest`` of its HTTP request; when that has been answered, the client's share is free again.
"""

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.actors.admission import RETRY_AFTER_S, check_admission
from engine.errors import RequestError
from engine.messages import DEFAULT_OPTIONS, Prompt, RequestOptions
from engine.params import SamplingParams
from engine.sections import LimitsSection, ServerSection
from server.backend import Ingress, Stream
from server.http.exchange import EXCHANGE, Exchange, Handler

SALT_CHARS = 32
# Asked by orchestrators, which have no key.
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})


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
            # Anthropic's clients send the key in a header of its own.
            bearer = f"Bearer {request.headers.get('X-Api-Key', '')}"
            scheme, _, key = request.headers.get("Authorization", bearer).partition(" ")
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


class ClientRequest:
    """One HTTP request of a client, and what it has opened in the engine: a stream for each choice.

    opened: called with each stream, if it is set."""

    def __init__(self, clients: "Clients", client: str, salt: str, exchange: Exchange) -> None:
        self.exchange = exchange
        self.streams: list[Stream] = []
        self.opened: Callable[[Stream], None] | None = None
        self._clients = clients
        self._client = client
        self._salt = salt

    def check_admission(self) -> None:
        """Raise RequestError rather than read a body that would be refused anyway."""
        check_admission(self._clients.ingress, self._clients.max_requests)

    def open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> Stream:
        """Open a choice as the engine's ingress does.  Raises RequestError, also a 429 if the client has its share."""
        self._clients.check_share(self._client)
        if self._salt:
            # Both have a fixed place, so that no client's own salt can make it another's.
            options = msgspec.structs.replace(options, cache_salt=f"{self._salt}:{options.cache_salt}")
        stream = self._clients.ingress.open(prompt, params, options)
        self._clients.num_open[self._client] += 1
        self.streams.append(stream)
        if self.opened is not None:
            self.opened(stream)
        return stream

    def close(self) -> None:
        """Give the client's share back."""
        num_open = self._clients.num_open
        num_open[self._client] -= len(self.streams)
        if not num_open[self._client]:
            del num_open[self._client]

    def abort(self, name: str | None = None) -> bool:
        """End the choices that are called so, or all, where they are; returns whether one of them was open."""
        part = None if name is None or self._is_whole(name) else self.exchange.parts[name]
        streams = self.streams if part is None else self.streams[part.start : part.stop]
        return sum(self._clients.ingress.abort(stream.request_id) for stream in streams) > 0

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is the request's own id, that of its answer, or that of a part."""
        return self._is_whole(name) or name in self.exchange.parts

    def _is_whole(self, name: str) -> bool:
        return name == self.exchange.id or name in self.exchange.names


CLIENT: web.RequestKey[ClientRequest] = web.RequestKey("client", ClientRequest)


class Clients:
    """Limits and salts of every client that has something open.  ``middleware`` goes after the check of keys.

    num_open: choices by client."""

    def __init__(
        self, ingress: Ingress, server: ServerSection, limits: LimitsSection, salts: CacheSalts | None = None
    ) -> None:
        self.ingress = ingress
        self.max_requests = limits.max_requests
        self.num_open: Counter[str] = Counter()
        self._salts = salts or CacheSalts(server)
        self._share = limits.max_requests_per_client
        self._requests: set[ClientRequest] = set()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every HTTP request the client that it is from, while it is handled."""
        exchange = request[EXCHANGE]
        number = exchange.key_number
        client = request.remote or "-" if number is None else f"key {number}"
        one = request[CLIENT] = ClientRequest(self, client, self._salts.of(number), exchange)
        self._requests.add(one)
        try:
            return await handler(request)
        finally:
            self._requests.discard(one)
            one.close()

    def abort(self, key_number: int | None, name: str | None = None) -> int:
        """End the open requests with this key; returns how many.  name: only those with this name."""
        mine = [one for one in self._requests if one.exchange.key_number == key_number]
        return sum(one.abort(name) for one in mine if name is None or one.is_called(name))

    def forget_cache(self, key_number: int | None) -> None:
        """Hide everything cached so far from the later requests of a key, and of those that it shares the cache with.

        Nothing is taken from requests that run; what was cached makes room as what is not used does."""
        self._salts.renew(key_number)

    def check_share(self, client: str) -> None:
        """Raise RequestError (429) if the client has as much open as it may."""
        if 0 < self._share <= self.num_open[client]:
            raise RequestError(
                f"{self.num_open[client]} of your requests are open, at most {self._share} are taken",
                status=429,
                code="client_queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
