"""Who is asking: what one client may have open at once, and whose cached prefixes it sees.

Owns: open requests per client, the salt that goes with a key.  Does not know: bodies, routes, what a request costs.
A client is an API key, or an address where there are no keys.  Routes open requests as ever, through an ingress that
looks at whose HTTP request it is in; when that one has been answered, everything it opened is closed.
"""

import hashlib
from collections import Counter
from contextvars import ContextVar
from typing import Any, cast

from aiohttp import web

from engine.config import LimitsSection, ServerSection
from engine.errors import RequestError
from engine.sampling.params import SamplingParams
from server.admission import RETRY_AFTER_S
from server.auth import key_list
from server.backend import Ingress, Prompt, Stream
from server.exchange import EXCHANGE, Handler

SALT_CHARS = 32


class _Visit:
    """One HTTP request.  num_opened: what it has opened in the engine, an entry for each choice."""

    __slots__ = ("client", "num_opened", "salt")

    def __init__(self, client: str, salt: str) -> None:
        self.client = client
        self.salt = salt
        self.num_opened = 0


class Clients:
    """Limits and salts of every client that has something open.  ``middleware`` goes after the check of keys."""

    def __init__(self, server: ServerSection, limits: LimitsSection) -> None:
        keys = key_list(server.api_key)
        # Not the keys themselves: a salt may show up in a log one day.  With one key there is nobody to tell apart.
        share = server.shared_cache or len(keys) < 2
        self._salts = [] if share else [hashlib.sha256(key.encode()).hexdigest()[:SALT_CHARS] for key in keys]
        self._limit = limits.max_requests_per_client
        self._num_open: Counter[str] = Counter()
        self._visit: ContextVar[_Visit | None] = ContextVar("visit", default=None)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note whose request it is while it is handled."""
        number = request[EXCHANGE].key_number
        client = request.remote or "-" if number is None else f"key {number}"
        visit = _Visit(client, self._salts[number] if self._salts and number is not None else "")
        token = self._visit.set(visit)
        try:
            return await handler(request)
        finally:
            self._visit.reset(token)
            self._close(visit)

    def guard(self, ingress: Ingress) -> Ingress:
        """``ingress``, for use by handlers."""
        return cast("Ingress", _GuardedIngress(ingress, self))

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
        return self._inner.open(prompt, params, cache_salt=self._clients.enter(cache_salt), **options)
