"""What one client may have open at once, and which cached prefixes it sees.

Owns: open requests per client, their names.  Does not know: bodies, routes, what a request costs.
A client is an API key, or an address where there are no keys.  A handler opens requests in the engine through the
``ClientRequest`` of its HTTP request; when that has been answered, the client's share is free again.
"""

from collections import Counter
from collections.abc import Callable

import msgspec
from aiohttp import web

from engine.actors.admission import RETRY_AFTER_S, check_admission
from engine.errors import RequestError
from engine.messages import DEFAULT_OPTIONS, Prompt, RequestOptions
from engine.params import SamplingParams
from engine.sections import LimitsSection, ServerSection
from server.backend import Ingress, Stream
from server.clients.keys import CacheSalts
from server.http.exchange import EXCHANGE, Exchange, Handler


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

    def abort(self) -> bool:
        """End every choice where it is; returns whether one of them was open."""
        return sum(self._clients.ingress.abort(stream.request_id) for stream in self.streams) > 0

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is the request's own id, or that of its answer."""
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
        return sum(one.abort() for one in mine if name is None or one.is_called(name))

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
