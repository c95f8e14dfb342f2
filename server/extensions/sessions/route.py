"""GET /sessions: the sessions of a client, and what each found in the cache.

Owns: which requests make a session.  Does not know: how the engine grants leases.
The sum is over the requests that are remembered (``MOST_ENDED`` of all clients), and those that run.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from aiohttp import web

from engine.features.sessions.holdings import asked_for, holdings_in
from engine.features.sessions.leases import SessionKey
from engine.features.sessions.planner import session_part
from server.backend import EngineMonitor
from server.clients import ClientRequest, Clients
from server.http.exchange import EXCHANGE
from server.http.operation import operation
from server.http.replies import json_reply

MOST_AT_ONCE: Final = 256  # sessions; the scheduler reads them between two steps


class SessionBody(msgspec.Struct, kw_only=True):
    """One session.  client, name: whose it is.  num_open: requests that run.  idle_s: since the last one has ended.

    prompt_tokens: of its requests that have ended.  cached_tokens: those of them that were found in the cache.
    leased_pages, lease_s: pages of the cache that it has a lease on, and for how long."""

    client: str
    name: str
    num_requests: int = 0
    num_open: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    idle_s: float = 0.0
    leased_pages: int = 0
    lease_s: float = 0.0


class SessionsBody(msgspec.Struct, frozen=True):
    """The sessions, the last used first.  An operator sees all, a client those of its key or address."""

    sessions: list[SessionBody]


class SessionsRoute:
    """Handles the route.  clock: monotonic seconds."""

    def __init__(self, monitor: EngineMonitor, clients: Clients, clock: Callable[[], float] = time.monotonic) -> None:
        self._monitor = monitor
        self._clients = clients
        self._clock = clock

    @operation("GET", "/sessions", "client", "What sessions found in the cache.", answer=SessionsBody)
    async def get(self, request: web.Request) -> web.Response:
        """Return the sessions that the client may see."""
        asking = request[EXCHANGE]
        known = self._clients.known_to(asking.key)
        if asking.key is None:  # clients without keys differ by their addresses
            known = [one for one in known if one.exchange.client == asking.client]
        sessions = summed(known, self._clock())
        asked = {SessionKey(one.client, session_part(one.name).digest): one for one in sessions}
        keys = list(asked)
        for at in range(0, len(keys), MOST_AT_ONCE):
            seen = await self._monitor.look(views=asked_for(keys[at : at + MOST_AT_ONCE]))
            for holding in holdings_in(seen.views):
                one = asked[SessionKey(holding.client, holding.digest)]
                one.leased_pages, one.lease_s = holding.num_pages, round(holding.seconds, 3)
        response = json_reply(SessionsBody(sessions))
        response.headers["Cache-Control"] = "no-store"
        return response


def summed(requests: Iterable[ClientRequest], now: float) -> list[SessionBody]:
    """Returns the sessions of requests, which are in the order of their arrival; the last used first."""
    found: dict[tuple[str, str], SessionBody] = {}
    for one in requests:
        exchange = one.exchange
        if not exchange.session:
            continue
        key = exchange.client, exchange.session
        session = found[key] = found.pop(key) if key in found else SessionBody(client=key[0], name=key[1])
        if exchange.ended_at is None:
            session.num_open += 1
            session.idle_s = 0.0
            continue
        session.num_requests += 1
        session.prompt_tokens += 0 if exchange.usage is None else exchange.usage[0]
        session.cached_tokens += exchange.cached_tokens
        session.idle_s = 0.0 if session.num_open else round(now - exchange.ended_at, 3)
    return [*reversed(found.values())]
