"""A request on its way to a replica and back.

Owns: what is sent on, which failures are tried again elsewhere.  Does not know: which replica is chosen, and why.

Nothing a request does outlives it, so it may be sent again as long as the client has not seen any of its response.  A
response in one piece is therefore held until it is complete, and one that streams until its first bytes are there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from engine.errors import RequestError
from engine.sections import ServerSection
from server.http.body import collect
from server.http.exchange import EXCHANGE, REQUEST_ID_HEADER
from server.http.replies import error_body
from server.replicas.affinity import PrefixAffinity
from server.replicas.replica import Replica, Replicas, unavailable

log = logging.getLogger(__name__)

# RFC 9110, 7.6.1, and what the two connections decide each for itself.
NOT_SENT_ON = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "accept-encoding", "expect", "server", "date",
    }
)  # fmt: skip
TRY_ELSEWHERE = frozenset({429, 503})  # this one is full or leaving; another one may not be
EVENT_STREAM = "text/event-stream"


class Proxy:
    """Handles every request that is not about the replicas themselves."""

    def __init__(
        self, server: ServerSection, replicas: Replicas, session: aiohttp.ClientSession, affinity: PrefixAffinity
    ) -> None:
        self._server = server
        self._replicas = replicas
        self._session = session
        self._affinity = affinity

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Send the request on.  Raises RequestError if no replica can answer."""
        body = await collect(request, self._server)
        # With keys, requests share cached prefixes only among those of one key.
        headers = request.headers
        tenant = headers.get("Authorization", headers.get("X-Api-Key", "")) if self._server.needs_key else ""
        blocks = self._affinity.blocks(body, tenant) if body else []
        tried: list[Replica] = []
        refusal: web.Response | None = None
        while True:
            try:
                replica = self._replicas.choose(blocks, tried)
            except RequestError:
                if refusal is not None:
                    return refusal
                raise
            tried.append(replica)
            try:
                with replica.busy():
                    response = await self._send(request, body, replica)
            except _ReplicaLost as error:
                self._replicas.lose(replica, error)
                log.info("request=%s is tried again elsewhere", request[EXCHANGE].id)
                continue
            if isinstance(response, web.Response) and response.status in TRY_ELSEWHERE:
                refusal = response
                continue
            return response

    async def _send(self, request: web.Request, body: bytes, replica: Replica) -> web.StreamResponse:
        """Try once.  Raises _ReplicaLost if the replica is lost before the client has seen anything."""
        headers = _sent_on(request.headers)
        headers[REQUEST_ID_HEADER] = request[EXCHANGE].id
        url = replica.url + str(request.rel_url)
        with _asking_replica():
            answer = await self._session.request(
                request.method, url, headers=headers, data=body or None, allow_redirects=False
            )
        async with answer:
            if not answer.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                with _asking_replica():
                    whole = await answer.read()
                return web.Response(status=answer.status, headers=_sent_on(answer.headers), body=whole)
            with _asking_replica():
                first = await answer.content.readany()
            response = web.StreamResponse(status=answer.status, headers=_sent_on(answer.headers))
            try:
                await response.prepare(request)
                await self._pass_on(first, answer.content, response, replica)
                await response.write_eof()
            except ConnectionError:
                pass  # the client has gone
            return response

    async def _pass_on(
        self, chunk: bytes, content: aiohttp.StreamReader, response: web.StreamResponse, replica: Replica
    ) -> None:
        """Pass a stream on, from its first chunk."""
        while chunk:
            await response.write(chunk)
            try:
                with _asking_replica():
                    chunk = await content.readany()
            except _ReplicaLost as error:
                self._replicas.lose(replica, error)
                lost = unavailable("the replica that ran this request was lost; send it again", "replica_lost")
                await response.write(b"data: " + msgspec.json.encode(error_body(lost)) + b"\n\n")
                return


class _ReplicaLost(Exception):
    """The replica's side of a request failed; for the client's side aiohttp has the same exceptions."""


@contextmanager
def _asking_replica() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _ReplicaLost(repr(error)) from error


def _sent_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in NOT_SENT_ON)
