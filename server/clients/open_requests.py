"""Who is asking: what one client may have open at once, and whose cached prefixes it sees.

Owns: open requests per client, their names.  Does not know: bodies, routes, what a
request costs.
A client is an API key, or an address where there are no keys.  Routes open requests as ever, through an ingress that
looks at whose HTTP request it is in; when that one has been answered, everything it opened is closed.
"""

from collections import Counter
from contextvars import ContextVar
from typing import Any, cast

from aiohttp import web

from engine.errors import RequestError
from engine.params import SamplingParams
from engine.sections import LimitsSection, ServerSection
from server.admission import RETRY_AFTER_S
from server.backend import Ingress, Prompt, Stream
from server.clients.salts import Salts
from server.http.exchange import EXCHANGE, Exchange, Handler


class _Visit:
    """One HTTP request.  num_opened: what was opened in the engine for it, an entry for each choice; streams: those."""

    __slots__ = ("client", "exchange", "num_opened", "salt", "streams")

    def __init__(self, client: str, salt: str, exchange: Exchange) -> None:
        self.client = client
        self.salt = salt
        self.exchange = exchange
        self.num_opened = 0
        self.streams: list[Stream] = []

    def is_called(self, name: str) -> bool:
        """By its own id, or that of its answer."""
        return name == self.exchange.id or name in self.exchange.names


class Clients:
    """Limits and salts of every client that has something open.  ``middleware`` goes after the check of keys."""

    def __init__(self, server: ServerSection, limits: LimitsSection, salts: Salts | None = None) -> None:
        self._salts = salts or Salts(server)
        self._limit = limits.max_requests_per_client
        self._num_open: Counter[str] = Counter()
        self._visits: dict[int, _Visit] = {}
        self._visit: ContextVar[_Visit | None] = ContextVar("visit", default=None)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note whose request it is while it is handled."""
        number = request[EXCHANGE].key_number
        client = request.remote or "-" if number is None else f"key {number}"
        visit = self._visits[id(request)] = _Visit(client, self._salts.of(number), request[EXCHANGE])
        token = self._visit.set(visit)
        try:
            return await handler(request)
        finally:
            self._visit.reset(token)
            del self._visits[id(request)]
            self._close(visit)

    def guard(self, ingress: Ingress) -> Ingress:
        """``ingress``, for use by handlers."""
        return cast("Ingress", _GuardedIngress(ingress, self))

    def opened(self, key_number: int | None, name: str | None = None) -> list[list[int]]:
        """What the open requests with this key have in the engine, by its numbers: an entry for each of them.

        name: only of those that are called so."""
        return [
            [stream.request_id for stream in visit.streams]
            for visit in self._visits.values()
            if visit.streams and visit.exchange.key_number == key_number and (name is None or visit.is_called(name))
        ]

    def forget_cache(self, key_number: int | None) -> None:
        """Requests from now on find nothing that was cached before for them, and for those they share it with.

        Nothing is taken from requests that run; what was cached makes room as what is not used does."""
        self._salts.renew(key_number)

    def enter(self, cache_salt: str) -> str:
        """One more choice is about to be opened; returns the salt to open it with.  Raises RequestError: 429."""
        visit = self._visit.get()
        if visit is None:
            return cache_salt
        if 0 < self._limit <= self._num_open[visit.client]:
            raise RequestError(
                f"{self._num_open[visit.client]} of your requests are open, at most {self._limit} are taken",
                status=429,
                code="client_queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        visit.num_opened += 1
        self._num_open[visit.client] += 1
        # Both have a fixed place, so that no client's own salt can make it another's.
        return f"{visit.salt}:{cache_salt}" if visit.salt else cache_salt

    def note(self, stream: Stream) -> None:
        """The choice has been opened."""
        if (visit := self._visit.get()) is not None:
            visit.streams.append(stream)

    def _close(self, visit: _Visit) -> None:
        self._num_open[visit.client] -= visit.num_opened
        if not self._num_open[visit.client]:
            del self._num_open[visit.client]


class _GuardedIngress:
    """An ingress, but for what ``open`` asks first."""

    def __init__(self, inner: Ingress, clients: Clients) -> None:
        self._inner = inner
        self._clients = clients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, prompt: Prompt, params: SamplingParams, *, cache_salt: str = "", **options: Any) -> Stream:
        """As the ingress does."""
        stream = self._inner.open(prompt, params, cache_salt=self._clients.enter(cache_salt), **options)
        self._clients.note(stream)
        return stream
