"""POST /abort_request and /reset_prefix_cache, GET /explain of a router: every replica is asked, as any may have it.

Owns: how their answers become one.  Does not know: what the replicas do; requests that go to one of them.
"""

import asyncio
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from engine.sections import ServerSection
from server.http.body import collect
from server.http.exchange import EXCHANGE, REQUEST_ID_HEADER, refuse_foreign_page
from server.http.replies import error_body
from server.operators.administration import AbortAnswer
from server.replicas.replica import CHECK_TIMEOUT_S, Group, Replica, State, unavailable

JSON = "application/json"
SENT_ON = ("Authorization", "X-Api-Key", "Content-Type")


class _Answer(NamedTuple):
    status: int
    body: bytes


class FleetAdministration:
    """Handles all three."""

    def __init__(self, server: ServerSection, replicas: Group, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._replicas = replicas
        self._session = session

    async def abort(self, request: web.Request) -> web.Response:
        """POST /abort_request: aborted is what some replica had, unknown is what none has."""
        answers = await self._ask_all(request)
        told = [msgspec.json.decode(one.body, type=AbortAnswer) for one in answers if one.status == 200]
        if not told:
            return _worst(answers)
        unknown = [name for name in told[0].unknown if all(name in one.unknown for one in told)]
        whole = AbortAnswer(num_aborted=sum(one.num_aborted for one in told), unknown=unknown)
        return web.Response(body=msgspec.json.encode(whole), content_type=JSON)

    async def reset(self, request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: done if all have done it."""
        refuse_foreign_page(request)
        return _worst(await self._ask_all(request))

    async def explain(self, request: web.Request) -> web.Response:
        """GET /explain/{id}: what a replica says that had the request; times are those that it took there."""
        answers = await self._ask_all(request)
        told = [one for one in answers if one.status == 200]
        if not told:
            return _worst(answers)
        return web.Response(body=told[-1].body, content_type=JSON)

    async def _ask_all(self, request: web.Request) -> list[_Answer]:
        """The answers of all replicas that run, ready or not: one that recovers has its requests, maybe its cache.

        Raises RequestError, a 503, if none is there."""
        body = await collect(request, self._server)
        headers = {name: request.headers[name] for name in SENT_ON if name in request.headers}
        headers[REQUEST_ID_HEADER] = request[EXCHANGE].id
        there = [one for one in self._replicas.all if one.url and one.state is not State.STOPPED]
        answers = await asyncio.gather(
            *(self._ask(one, request.method, request.raw_path, body, headers) for one in there)
        )
        found = [one for one in answers if one is not None]
        if not found:
            raise unavailable(f"no {self._replicas.noun} is there now")
        return found

    async def _ask(
        self, replica: Replica, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> _Answer | None:
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        url = URL(replica.url + path, encoded=True)
        try:
            async with self._session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
                return _Answer(response.status, await response.read())
        except aiohttp.ClientConnectorError as error:
            self._replicas.lose(replica, repr(error))
            return None  # nothing listens there: it has neither requests nor a cache any more
        except (aiohttp.ClientError, TimeoutError) as error:
            self._replicas.lose(replica, repr(error))
            silent = unavailable(f"{replica.name} does not answer; ask again", "replica_lost")
            return _Answer(silent.status, msgspec.json.encode(error_body(silent)))


def _worst(answers: list[_Answer]) -> web.Response:
    answer = max(answers, key=lambda one: one.status)
    return web.Response(status=answer.status, body=answer.body, content_type=JSON)
