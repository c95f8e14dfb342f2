"""A request on its way to a replica and back.

Owns: what is sent on, which failures are tried again elsewhere, what is counted of a client.
Does not know: which replica is chosen, and why; how far a stream has got.

Nothing a request does outlives it, so it may be sent again as long as the client has not seen any of its response.  A
response in one piece is therefore held until it is complete.  A stream whose replica is lost goes on at another one,
from what the client has of it.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from types import MappingProxyType
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from engine.actors.admission import CHARS_PER_TOKEN
from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.clients import LEAST_OUTPUT, Charge, Rates
from server.http.body import JSON_TYPE, ROUTED_TYPE, collect, is_object, media_type
from server.http.exchange import CLIENT_LEFT, EXCHANGE, REQUEST_ID_HEADER, USAGE_HEADER
from server.http.replies import error_body
from server.http.sse import DONE, EVENT_STREAM, LINES
from server.proxy.affinity import PrefixAffinity, tenant_of
from server.proxy.passage import Passage, WholeLines, WrongMark
from server.proxy.pieces import BodyPieces
from server.proxy.replica import Choice, Replica, unavailable

log = logging.getLogger(__name__)

# RFC 9110, 7.6.1, and what the two connections decide each for itself.
NOT_SENT_ON = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "accept-encoding", "expect", "server", "date", USAGE_HEADER.lower(),
    }
)  # fmt: skip
TRY_ELSEWHERE = frozenset({429, 503})  # this one is full or leaving; another one may not be
REFUSED = frozenset({*range(400, CLIENT_LEFT), 503})  # before anything was done for a prompt, unless there is a usage
MORE_HEADERS = web.RequestKey("more_headers", dict[str, str])  # that a replica gets with the request
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
MOST_LOSSES = 3  # of replicas, in one stream: it may be what ends them
GO_ON_WITHIN_S = 30.0
CONNECT_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.2


def new_session(headers: Mapping[str, str] = NO_HEADERS) -> aiohttp.ClientSession:
    """Returns the session that sends requests on.  headers: of each.

    Generating takes as long as its server's limits let it; reaching it does not."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Proxy:
    """Sends requests on.  go_on_within_s: how long a stream waits for one that goes on with it."""

    def __init__(
        self,
        server: ServerSection,
        replicas: Choice,
        session: aiohttp.ClientSession,
        affinity: PrefixAffinity,
        rates: Rates,
        go_on_within_s: float = GO_ON_WITHIN_S,
    ) -> None:
        self._server = server
        self._replicas = replicas
        self._session = session
        self._affinity = affinity
        self._rates = rates
        self._go_on_within_s = go_on_within_s

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Send a request on.  Raises RequestError if no replica can answer."""
        return await self.send_on(request, await collect(request, self._server))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Send on what costs tokens: they are counted, and a stream outlives its replica.

        Raises RequestError if no replica can answer, and for a client that has used up what it has in a minute."""
        client = request[EXCHANGE].client
        self._rates.check(client)
        body = await collect(request, self._server)
        return await self.send_counted(request, body, self._rates.admit(client))

    async def send_counted(self, request: web.Request, body: bytes, charge: Charge) -> web.StreamResponse:
        """Do so for a body that has been read.  charge: its client pays the prompt at least, if a replica takes it.

        Only a replica counts a prompt, so until it has sent the number they are estimated from the body."""
        exchange, status = request[EXCHANGE], CLIENT_LEFT
        declared = exchange.operation
        goes_on = declared is not None and declared.framing != "lines" and media_type(request) == JSON_TYPE
        blocks = self._blocks(request, body)
        passage = Passage(body) if goes_on and (blocks or is_object(body)) else None
        estimated = len(body) // CHARS_PER_TOKEN + 1
        charge.pay(estimated + LEAST_OUTPUT)
        try:
            response = await self.send_on(request, body, passage, blocks)
            status = response.status
            return response
        except RequestError as error:
            status = error.status
            raise
        finally:
            if passage is not None and passage.has_begun:
                exchange.usage = passage.num_prompt_tokens, passage.num_tokens
            is_told = status == HTTPStatus.OK and (passage is None or not passage.has_begun or passage.has_ended)
            if exchange.usage is None:
                charge.pay(0 if status in REFUSED else estimated)
            else:
                charge.pay(max(sum(exchange.usage), 0 if is_told else estimated))

    def _blocks(self, request: web.Request, body: bytes) -> list[bytes]:
        tenant = tenant_of(request.headers, needs_key=self._server.needs_key)
        return self._affinity.blocks(body, tenant, request[EXCHANGE].offered_session) if body else []

    async def send_on(
        self, request: web.Request, body: bytes, passage: Passage | None = None, blocks: list[bytes] | None = None
    ) -> web.StreamResponse:
        """Send a request on.  passage: of what may be cut and go on elsewhere.  blocks: of its prompt, if known.

        Raises RequestError if no replica can answer."""
        _check_path(request)
        if media_type(request) == ROUTED_TYPE:
            # A replica would take it for the router's own, and what its stream costs would not be counted here.
            raise RequestError(
                f"{ROUTED_TYPE} is what a router sends; send application/json",
                status=415,
                code="unsupported_media_type",
            )
        blocks = self._blocks(request, body) if blocks is None else blocks
        delivery = Delivery(request, body, passage, self._session)
        tried: list[Replica] = []
        refusal: web.StreamResponse | None = None
        while True:
            try:
                replica = self._replicas.choose(blocks, tried)
            except RequestError:
                if refusal is not None:
                    return refusal
                raise
            tried.append(replica)
            try:
                with replica.busy(len(blocks)):
                    response = await delivery.ask(replica)
            except _ReplicaLost as error:
                self._replicas.lose(replica, error, error.url)
                if delivery.stream is not None:
                    return await self.go_on(delivery, blocks)
                log.info("request=%s is tried again elsewhere", delivery.id)
                continue
            if response.status in TRY_ELSEWHERE:
                refusal = response
                continue
            return response

    async def go_on(self, delivery: "Delivery", blocks: list[bytes]) -> web.StreamResponse:
        """Let other replicas go on with a stream whose replica is lost, or end it with an error."""
        clock = asyncio.get_running_loop().time
        num_losses, deadline = 1, clock() + self._go_on_within_s
        while delivery.can_go_on and num_losses < MOST_LOSSES and clock() < deadline and not self._replicas.is_leaving:
            try:
                replica = self._replicas.choose(blocks, [])
            except RequestError:
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            log.info("request=%s goes on at %s", delivery.id, replica.name)
            self._replicas.num_resumed += 1
            try:
                with replica.busy(len(blocks)):
                    response = await delivery.ask(replica)
            except _ReplicaLost as error:
                self._replicas.lose(replica, error, error.url)
                num_losses, deadline = num_losses + 1, clock() + self._go_on_within_s
                continue
            if response is delivery.stream:
                return response
            if response.status not in TRY_ELSEWHERE:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        return await delivery.fail(
            unavailable("the replica that ran this request was lost; send it again", "replica_lost")
        )


class Delivery:
    """One request and what its client gets.  stream: the client's, once it has begun."""

    _replica: Replica

    def __init__(
        self, request: web.Request, body: bytes, passage: Passage | None, session: aiohttp.ClientSession
    ) -> None:
        self.stream: web.StreamResponse | None = None
        self.request = request
        self._body = body
        self._passage = passage
        self._session = session
        self._exchange = request[EXCHANGE]

    @property
    def id(self) -> str:
        """The request's."""
        return self._exchange.id

    @property
    def can_go_on(self) -> bool:
        """Whether another replica can go on with a stream that was cut."""
        return self._passage is not None and not self._passage.was_aborted

    async def ask(self, replica: Replica) -> web.StreamResponse:
        """Send the request, or what is left of it, to a replica.  Returns the stream once it has ended, or a response.

        Raises _ReplicaLost."""
        url, self._exchange.replica, self._replica = replica.url, replica.name, replica
        async with await self._open(url) as answer:
            if not answer.headers.get("Content-Type", "").startswith((EVENT_STREAM, LINES)):
                with _asking(url):
                    whole = await answer.read()
                if USAGE_HEADER in answer.headers:
                    num_prompt, num_completion = map(int, answer.headers[USAGE_HEADER].split())
                    self._exchange.usage = num_prompt, num_completion
                return web.Response(status=answer.status, headers=sent_on(answer.headers), body=whole)
            with _asking(url):
                first = await answer.content.readany()
            if is_new := self.stream is None:
                self.stream = web.StreamResponse(status=answer.status, headers=sent_on(answer.headers))
            stream = self.stream
            assert stream is not None
            with suppress(ConnectionError):  # of a client that has gone
                if is_new:
                    await stream.prepare(self.request)
                await self._pass_on(url, first, answer.content, stream)
            return stream

    async def fail(self, error: RequestError) -> web.StreamResponse:
        """End the stream with an error, as an engine ends one."""
        assert self.stream is not None, "nothing was sent, so the error has a status"
        form = self._exchange.error_format
        word = msgspec.json.encode(form(error))
        if _has_lines(self.stream):
            event = word + b"\n"
        else:
            name, last = (b"", DONE) if form is error_body else (b"event: error\n", b"")
            event = b"%bdata: %b\n\n%b" % (name, word, last)
        with suppress(ConnectionError):
            await self.stream.write(event)
        return self.stream

    async def _open(self, url: str) -> aiohttp.ClientResponse:
        headers = sent_on(self.request.headers)
        pieces: tuple[bytes, ...] = (self._body,)
        headers[REQUEST_ID_HEADER] = self.id
        headers.update(self.request.get(MORE_HEADERS, NO_HEADERS))
        if self._passage is not None:
            headers["Content-Type"], pieces = ROUTED_TYPE, self._passage.pieces()
        with _asking(url):
            return await self._session.request(
                self.request.method,
                URL(url + self.request.rel_url.raw_path_qs, encoded=True),  # as it came, and as it was matched
                headers=headers,
                data=BodyPieces(pieces) if self._body else None,
                allow_redirects=False,
            )

    async def _pass_on(self, url: str, chunk: bytes, content: aiohttp.StreamReader, stream: web.StreamResponse) -> None:
        """Pass a stream on, from its first chunk."""
        passage: Passage | WholeLines | None = self._passage
        if _has_lines(stream):
            passage = WholeLines()
        while chunk:
            with _asking(url):
                told = chunk if passage is None else passage.take(chunk)
            if told:
                await stream.write(told)
            if self._replica.moves and self.can_go_on and passage is self._passage:
                raise _ReplicaLost("its rows move", url)
            with _asking(url):
                chunk = await content.readany()
        if passage is not None:
            with _asking(url):
                told = passage.rest()
            await stream.write(told)
        await stream.write_eof()


class _ReplicaLost(Exception):
    """The replica's side of a request failed; for the client's side aiohttp has the same exceptions."""

    def __init__(self, reason: object, url: str) -> None:
        super().__init__(repr(reason))
        self.url = url


@contextmanager
def _asking(url: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, WrongMark) as error:
        raise _ReplicaLost(error, url) from error


def _has_lines(stream: web.StreamResponse) -> bool:
    return stream.headers.get("Content-Type", "").startswith(LINES)


def _check_path(request: web.Request) -> None:
    """Raise RequestError (400) for a path that another server could read as another one: this one has matched it."""
    if not {".", ".."}.isdisjoint(unquote(request.rel_url.raw_path).split("/")):
        reason = "the path has a segment '.' or '..'; ask for the path that it leads to"
        raise RequestError(reason, code="malformed_path")


def sent_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in NOT_SENT_ON)
