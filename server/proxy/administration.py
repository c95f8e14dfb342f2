"""Requests that a router sends to every replica, as any may have what they ask for: aborts, resets, explanations.

Owns: how their answers become one.  Does not know: what the replicas do; requests that go to one of them.
"""

import asyncio
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from engine.settings.sections import ServerSection
from server.http.body import collect
from server.http.exchange import EXCHANGE, REQUEST_ID_HEADER, refuse_foreign_page
from server.http.replies import error_body
from server.operators.administration import AbortAnswer
from server.proxy.replica import CHECK_TIMEOUT_S, Group, Replica, State, unavailable

JSON = "application/json"
SENT_ON = ("Authorization", "X-Api-Key", "Content-Type")


class Answer(NamedTuple):
    """The answer of a replica."""

    status: int
    body: bytes


Answered = tuple[Replica, Answer | aiohttp.ClientError | TimeoutError]


async def ask_all(
    group: Group, session: aiohttp.ClientSession, request: web.Request, body: bytes = b""
) -> list[Answered]:
    """Send a request to all replicas that run, ready or not: one that recovers has its requests, maybe its cache.

    Returns what each has answered, to a GET for a HEAD, or why it has not."""
    headers = {name: request.headers[name] for name in SENT_ON if name in request.headers}
    headers[REQUEST_ID_HEADER] = request[EXCHANGE].id
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    method, path = "GET" if request.method == "HEAD" else request.method, request.rel_url.raw_path_qs

    async def ask(replica: Replica) -> Answered:
        url = URL(replica.url + path, encoded=True)  # as sent, but without the host that a client may name
        try:
            async with session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
                return replica, Answer(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            return replica, error

    return await asyncio.gather(*(ask(one) for one in group.all if one.url and one.state is not State.STOPPED))


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

    async def gather(self, request: web.Request) -> web.Response:
        """Answer as the one does that has what is asked for, such as a request to explain."""
        answers = await self._ask_all(request)
        told = [one for one in answers if one.status == 200]
        if not told:
            return _worst(answers)
        return web.Response(body=told[-1].body, content_type=JSON)

    async def _ask_all(self, request: web.Request) -> list[Answer]:
        """Raises RequestError, a 503, if no replica is there."""
        body = await collect(request, self._server)
        found: list[Answer] = []
        for replica, told in await ask_all(self._replicas, self._session, request, body):
            if isinstance(told, Answer):
                found.append(told)
                continue
            self._replicas.lose(replica, repr(told))
            # Where nothing listens there are neither requests nor a cache any more.
            if not isinstance(told, aiohttp.ClientConnectorError):
                silent = unavailable(f"{replica.name} does not answer; ask again", "replica_lost")
                found.append(Answer(silent.status, msgspec.json.encode(error_body(silent))))
        if not found:
            raise unavailable(f"no {self._replicas.noun} is there now")
        return found


def _worst(answers: list[Answer]) -> web.Response:
    answer = max(answers, key=lambda one: one.status)
    return web.Response(status=answer.status, body=answer.body, content_type=JSON)
