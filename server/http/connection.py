"""Connections with the deadlines and the cap that aiohttp's own do not have.

Owns: the time from a connection's beginning, or a request's first byte, to the end of its headers; writes that get
nowhere; the number of connections, also by address, and which one makes room; the answer to bytes that are not HTTP.
Does not know: routes, bodies, the engine.

Relies on what aiohttp 3.14.2 to 3.14.5 have and do not document: RequestHandler._messages, _request_count,
_request_in_progress, _loop, _close; Server._connections, _kwargs; AppRunner._make_server.
"""

import asyncio
import fcntl
import logging
import socket
import ssl
import struct
import sys
import termios
import time
import warnings
from collections import Counter, deque
from typing import Any, cast

from aiohttp import BadContentDispositionHeader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler

from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError, RequestError
from server.http.exchange import EXCHANGE, Exchange, OutermostHandler, Traffic
from server.http.listener import BACKLOG
from server.http.replies import error_response, raw_response
from server.http.tls import LOOK_EVERY_S as LOOK_AT_TLS_EVERY_S
from server.http.tls import Tls
from server.http.turnstile import Turnstile, network_of

log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 64 << 10
KEEPALIVE_TIMEOUT_S = 75.0  # of an idle connection
MOST_WAITS = 16  # of a connection's writes, remembered
LAST_DATA_RECV = slice(52, 56)  # of struct tcp_info: milliseconds since then
MOST_WATCHED = 64  # clients that have not read an answer to its end, to know when they have
LOOK_EVERY_S, LOOK_SHARE = 0.005, 0.01  # and how often: at first, and as a share of the time since
SHARE_OF_AN_ADDRESS = 4  # of all places, unless it is configured: one in so many
PLACES_FOR_PROBES = 16
PROBES = frozenset({"/health", "/ready", "/ping"})
LINGERING_S = 2.0  # for a body that the handler has not read


class Connection(RequestHandler):
    """One client's connection."""

    def __init__(self, manager: "ConnectionServer", server: ServerSection, **options: Any) -> None:
        super().__init__(manager, **options)
        self._connections = manager
        self._traffic = manager.traffic
        self._settings = server
        self._wire: asyncio.Transport | None = None  # unlike aiohttp's own, kept until the connection is lost
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request whose header is complete
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_counted = False
        self.arrived_at = time.monotonic()  # of the last request's first bytes, on this machine
        self._paused_at: float | None = None
        self._waits: deque[tuple[float, float]] = deque(maxlen=MOST_WAITS)

    # ---- life -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast("asyncio.Transport", transport)
        if not self._connections.take(self, _address(self._wire)):
            log.warning("connection refused: %d are open", self._connections.num_open)
            self._traffic.cuts["too_many"] += 1
            self._close = True  # whatever it sends is dropped
            self._wire.write(raw_response(_too_many()))
            self._wire.close()
            return
        self._wire.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._traffic.num_connections += 1
        self._is_counted = True
        super().connection_made(transport)
        self._watch_header()  # for its first byte as well

    def connection_lost(self, error: BaseException | None) -> None:
        self._wire = None
        self._connections.let_go(self)
        if self._is_counted:
            self._traffic.num_connections -= 1
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(error)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or waits for that."""
        return bool(self._request_in_progress or self._messages)

    def evict(self) -> None:
        """Close it, in which nothing is asked, to make room for another one."""
        self._traffic.cuts["evicted"] += 1
        self.force_close()
        if self._wire is not None:
            self._wire.abort()

    async def start(self) -> None:
        """Serve requests until the connection ends; what is then still unsent has its deadline too."""
        try:
            await super().start()
        except Exception:
            # aiohttp makes the request object outside of its own try, and some targets that its parser lets through
            # (CONNECT without one) make that fail.  The connection would stay open and unserved.
            log.info("connection closed: a request that could not be understood", exc_info=True)
            self._refuse(_unreadable())
        finally:
            self._watch_writes()

    def _refuse(self, error: RequestError) -> None:
        if self.transport is not None:
            self.transport.write(raw_response(error))
            self.force_close()

    # ---- reading ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        between_requests = self._body.is_eof()
        if between_requests:
            self.arrived_at = time.monotonic() - self._waited_s()
        super().data_received(data)
        if self._request_count > num_requests:
            self._stop_header_timer()
            self._body = self._messages[-1][1]
        elif between_requests and self._header_timer is None and data.strip(b"\r\n"):
            self._watch_header()

    def _waited_s(self) -> float:
        """Returns how long ago the last bytes came that this event loop reads only now; the kernel counts
        milliseconds."""
        if self._wire is None or sys.platform != "linux":
            return 0.0
        try:
            info = self._wire.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        except OSError:
            return 0.0  # not TCP
        return int.from_bytes(info[LAST_DATA_RECV], sys.byteorder) / 1000

    def _watch_header(self) -> None:
        self._header_timer = self._loop.call_later(self._settings.client_timeout_s, self._header_expired)

    def _header_expired(self) -> None:
        self._header_timer = None
        if self.is_busy:
            self._watch_header()  # pipelined behind a request that still runs, which must not suffer
            return
        self._traffic.cuts["header_timeout"] += 1
        seconds = f"{self._settings.client_timeout_s:g} s"
        error = RequestError(f"the headers did not arrive within {seconds}", status=408, code="header_timeout")
        self._refuse(error)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    # ---- writing ----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at = time.monotonic()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_wait()
        self._stop_write_timer()
        if self._wire is not None and self._wire.is_closing():
            self._watch_writes()

    def _note_wait(self) -> None:
        if self._paused_at is not None:
            self._waits.append((self._paused_at, time.monotonic()))
            self._paused_at = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of a response, and note when that is out."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._connections.rest(self)
            exchange = request[EXCHANGE]
            exchange.ended_at = written_at = time.monotonic()
            exchange.waits = tuple(wait for wait in self._waits if wait[1] > exchange.arrived_at)
            if self._connections.num_watched < MOST_WATCHED and self._num_unread():
                self._connections.num_watched += 1
                self._watch_reader(exchange, written_at, self._request_count)

    def _num_unread(self) -> int:
        """Bytes that the client's machine has not taken yet."""
        if self._wire is None or self._wire.is_closing():
            return 0
        if num_bytes := self._wire.get_write_buffer_size():
            return num_bytes
        try:
            told = fcntl.ioctl(self._wire.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0  # of a kind of socket that cannot say
        return int.from_bytes(told, sys.byteorder)

    def _watch_reader(self, exchange: Exchange, written_at: float, num_requests: int) -> None:
        """Look again until the client has taken the answer, or asks for something else."""
        now = time.monotonic()
        if self._request_count == num_requests and self._num_unread():
            later_s = max(LOOK_EVERY_S, LOOK_SHARE * (now - written_at))
            self._loop.call_later(later_s, self._watch_reader, exchange, written_at, num_requests)
            return
        self._connections.num_watched -= 1
        exchange.ended_at = now
        exchange.waits = (*exchange.waits, (written_at, now))

    def _watch_writes(self) -> None:
        """Called when nothing will be added to the buffer: a client that reads at all makes it shrink."""
        if self._wire is None or self._write_timer is not None:
            return
        if num_bytes := self._wire.get_write_buffer_size():
            timeout_s = self._settings.client_timeout_s
            self._write_timer = self._loop.call_later(timeout_s, self._check_writes, self._wire, num_bytes)

    def _check_writes(self, wire: asyncio.Transport, num_bytes_before: int) -> None:
        self._write_timer = None
        if wire.get_write_buffer_size() < num_bytes_before:
            self._watch_writes()
            return
        log.info("connection cut: the client has read nothing for %g s", self._settings.client_timeout_s)
        self._traffic.cuts["write_timeout"] += 1
        # A reset, so that the kernel forgets the unread data as well.
        wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- what is not HTTP -------------------------------------------------------------------

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Bytes that the parser refused (400, or 431 for too many of them), or a failure in aiohttp itself."""
        if request.writer.output_size > 0:
            raise ConnectionError("an error after the response has begun")
        if status >= 500:
            log.error("request failed outside of its handler", exc_info=exc)
            error = RequestError("internal error; the server log has the details", status=500, code="internal_error")
        elif isinstance(exc, LineTooLong):
            why = f"the request line or a header is longer than {exc.args[1]} bytes"
            error = RequestError(why, status=431, code="headers_too_large")
        else:
            error = _unreadable()
        self._traffic.cuts["malformed"] += 1
        exchange = request[EXCHANGE] = Exchange.of(request)
        exchange.log(request, error.status, 0.0)
        response = error_response(error)
        response.headers.update(exchange.headers)
        response.force_close()
        return response


class ConnectionServer(web.Server):
    """Makes the connections and gives them places.  num_watched: of them, clients that read their last bytes.

    When all places are taken, or all of an address, the connection goes in which nothing has been asked for longest.
    A few places more are for probes, so that a server full of requests is not taken for a dead one."""

    def __init__(self, plain: web.Server, server: ServerSection, traffic: Traffic) -> None:
        self._outermost = OutermostHandler(plain.request_handler, traffic, server)
        super().__init__(
            self._handle,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,
        )
        self._section = server
        self.traffic = traffic
        self.num_watched = 0
        self._places: dict[Connection, str] = {}  # its address; those that have rested longest are first
        self._num_from: Counter[str] = Counter()
        self._for_probes: set[Connection] = set()
        self._turnstile = Turnstile()

    @property
    def num_open(self) -> int:
        """Connections that are served now."""
        return len(self._places)

    def take(self, connection: Connection, address: str) -> bool:
        """Give a new connection a place.  Returns whether there is one."""
        section = self._section
        most = section.max_connections_per_address or max(1, section.max_connections // SHARE_OF_AN_ADDRESS)
        if self._num_from[address] >= most and not self._evict(address):
            return False
        if self.num_open >= section.max_connections and not self._evict():
            if len(self._for_probes) >= PLACES_FOR_PROBES:
                return False
            self._for_probes.add(connection)
        self._places[connection] = address
        self._num_from[address] += 1
        return True

    def let_go(self, connection: Connection) -> None:
        """Give the place of a connection to another."""
        self._for_probes.discard(connection)
        if (address := self._places.pop(connection, None)) is not None:
            self._num_from[address] -= 1
            if not self._num_from[address]:
                del self._num_from[address]

    def rest(self, connection: Connection) -> None:
        """Note that a connection has no request from now on."""
        if connection in self._places:
            self._places[connection] = self._places.pop(connection)

    def _evict(self, address: str = "") -> bool:
        """Close the connection that has rested longest, of an address or of all.  Returns whether one rests."""
        resting = (one for one, of in self._places.items() if not one.is_busy and address in ("", of))
        connection = next(resting, None)
        if connection is None:
            return False
        self.let_go(connection)
        connection.evict()
        return True

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.protocol in self._for_probes and request.path not in PROBES:
            request[EXCHANGE] = Exchange.of(request)
            response = error_response(_too_many())
            response.force_close()
            return response
        await self._turnstile.enter(request.remote or "-")
        return await self._outermost.handle(request)

    def __call__(self) -> RequestHandler:
        return Connection(self, self._section, loop=asyncio.get_running_loop(), **self._kwargs)


class HttpRunner(web.AppRunner):
    """The runner of aiohttp for an application behind these connections.

    handler_cancellation: a client that leaves cancels its handler, and so its requests in the engine.
    traffic: where to count; None for a counter of its own.
    auto_decompress: off, since a small body could otherwise unfold into gigabytes on the event loop.
    """

    def __init__(self, app: web.Application, server: ServerSection, traffic: Traffic | None = None) -> None:
        require_c_parser()
        # It prints what a client has sent, up to 8 KB of it for each part of a form.
        warnings.simplefilter("ignore", BadContentDispositionHeader)
        super().__init__(
            app,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            handle_signals=False,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            lingering_time=LINGERING_S,
            shutdown_timeout=server.client_timeout_s,
        )
        self._section = server
        self._traffic = Traffic() if traffic is None else traffic
        self._looking: asyncio.Task[None] | None = None

    async def listen(self, *listeners: socket.socket) -> None:
        """Set the application up, and accept connections from now on."""
        await self.setup()
        if self._section.tls_cert:
            tls = Tls(self._section)
            for listener in listeners:
                await TlsSite(self, listener, tls.context, self._section.client_timeout_s).start()
            self._looking = asyncio.create_task(_look_again(tls), name="tls")
        else:
            for listener in listeners:
                await web.SockSite(self, listener, backlog=BACKLOG).start()
        log.info("listening on %s", " and ".join(map(str, self.addresses)))

    async def cleanup(self) -> None:
        """Serve no more."""
        if self._looking is not None:
            self._looking.cancel()
        await super().cleanup()

    async def _make_server(self) -> web.Server:
        return ConnectionServer(await super()._make_server(), self._section, self._traffic)


class TlsSite(web.SockSite):
    """A site whose clients have so long to agree on keys.  aiohttp's own gives them a minute."""

    def __init__(self, runner: HttpRunner, listener: socket.socket, context: ssl.SSLContext, timeout_s: float) -> None:
        super().__init__(runner, listener, ssl_context=context, backlog=BACKLOG)
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Accept connections from now on."""
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            server, sock=self._sock, ssl=self._ssl_context, backlog=BACKLOG, ssl_handshake_timeout=self._timeout_s
        )


async def _look_again(tls: Tls) -> None:
    while True:
        await asyncio.sleep(LOOK_AT_TLS_EVERY_S)
        tls.look()


def _address(wire: asyncio.Transport) -> str:
    """Return what a connection counts for."""
    peer = wire.get_extra_info("peername")
    return network_of(str(peer[0])) if isinstance(peer, tuple) else "-"


def _too_many() -> RequestError:
    return RequestError("too many connections", status=503, code="too_many_connections", retry_after_s=1)


def _unreadable() -> RequestError:
    return RequestError("this is not an HTTP request that can be read", status=400, code="malformed_http")


def require_c_parser() -> None:
    """Raise ConfigError if aiohttp would parse HTTP in Python: slow, and the source of most of its advisories."""
    from aiohttp import http_parser

    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise ConfigError(
            "aiohttp runs without its C parser, which this server does not accept; "
            "unset AIOHTTP_NO_EXTENSIONS or install an aiohttp wheel for this platform"
        )
