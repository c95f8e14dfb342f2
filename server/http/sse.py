"""A response as server-sent events, or as lines of JSON.

Owns: framing, headers, pings, not running ahead of a client that reads slowly.  Does not know: what the events say.
Events are JSON without line breaks (JSON escapes them), so no text can end an event early.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec
from aiohttp import HttpVersion11, web

from engine.types.errors import CallboardError, RequestError
from server.http.exchange import EXCHANGE
from server.http.operation import Framing
from server.http.replies import as_request_error

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PING_COMMENT = b": ping\n\n"
EVENT_STREAM = "text/event-stream"
LINES = "application/x-ndjson"
PING_EVENT = b'event: ping\ndata: {"type":"ping"}\n\n'


class Ping(NamedTuple):
    """The bytes that a stream sends when it has sent nothing for ``after_s`` seconds, 0 for never."""

    data: bytes
    after_s: float


class EventStream:
    """Sends events.  Until the first one, or the first ping, nothing goes out, and an error has its own status."""

    def __init__(self, request: web.Request, *, framing: Framing, ping: Ping) -> None:
        """Make a stream.  framing: see ``Operation``; lines have no pings."""
        self._request = request
        self._framing = framing
        self._ping = ping if framing != "lines" else Ping(b"", 0.0)
        self._clock = asyncio.get_running_loop().time
        self._wrote_at = self._clock()
        self._encoder = msgspec.json.Encoder()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": f"{EVENT_STREAM if framing != 'lines' else LINES}; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would otherwise collect the events
                **request[EXCHANGE].headers,
            }
        )
        self._protocol = request.protocol
        self._is_chunked = request.version == HttpVersion11
        if self._is_chunked:
            self.response.enable_chunked_encoding()

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    async def send(self, events: Iterable[msgspec.Struct], mark: bytes = b"") -> None:
        """Write events; returns when the connection can take more.  Raises ConnectionError when the client is gone.

        mark: a comment that comes with them."""
        if data := self._framed(events) + mark:
            await self._write(data)

    def send_now(self, events: Iterable[msgspec.Struct], mark: bytes = b"") -> bool:
        """Write events of a stream that has started, without waiting; returns whether it could take more now.

        Raises ConnectionError when the client is gone."""
        return self._put_now(self._framed(events) + mark)

    def write_now(self, data: bytes) -> bool:
        """Write an event that is encoded already, as ``send_now`` does."""
        return self._put_now(data)

    def _put_now(self, data: bytes) -> bool:
        """Straight to the transport: aiohttp's own way costs as much as making an event, for what is one line here."""
        if not data:
            return True
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._wrote_at = self._clock()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return not self._protocol.writing_paused

    def cut(self) -> None:
        """End the connection, so that its reader sees that this was not all.  Raises ConnectionResetError."""
        if (transport := self._protocol.transport) is not None:
            transport.abort()
        raise ConnectionResetError("the stream is cut")

    async def drained(self) -> None:
        """Wait until the connection can take more."""
        if self._protocol.writing_paused:
            await self._request.writer.drain()

    def _framed(self, events: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(self._frames(events))

    def _frames(self, events: Iterable[msgspec.Struct]) -> list[bytes]:
        encode = self._encoder.encode
        if self._framing == "lines":
            return [encode(event) + b"\n" for event in events]
        if self._framing == "events":
            return [b"event: %s\ndata: %s\n\n" % (event.type.encode(), encode(event)) for event in events]  # type: ignore[attr-defined]
        return [b"data: %b\n\n" % encode(event) for event in events]

    async def carry(
        self, sending: Awaitable[None], last_word: Callable[[RequestError], msgspec.Struct]
    ) -> web.StreamResponse:
        """Wait for ``sending``, which sends the events, and say that this was all.  Returns the response.

        Its error becomes the last event, since the status can no longer be changed; it is raised if nothing was sent.
        A client that has left is no error."""
        pinging = asyncio.create_task(self._keep_alive(), name="pings") if self._ping.after_s else None
        try:
            try:
                await sending
            except ConnectionError:
                raise
            except Exception as error:
                if not self.started:
                    raise
                if not isinstance(error, CallboardError):
                    log.exception("request=%s failed in its stream", self._request[EXCHANGE].id)
                await self.send([last_word(as_request_error(error))])
            finally:
                if pinging is not None:
                    pinging.cancel()
            await self._end()
        except ConnectionError:
            pass
        return self.response

    async def _keep_alive(self) -> None:
        """Send a ping whenever nothing was sent for so long, so that nothing between here and the client gives up."""
        with suppress(ConnectionError):  # which the sender of the events meets as well
            while True:
                await asyncio.sleep(self._wrote_at + self._ping.after_s - self._clock())
                if self._clock() - self._wrote_at >= self._ping.after_s:
                    await self._write(self._ping.data)

    async def _end(self) -> None:
        if self._framing == "data":
            await self._write(DONE)
        elif not self.started:
            await self.response.prepare(self._request)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        if not self.started:
            await self.response.prepare(self._request)
        self._wrote_at = self._clock()
        await self.response.write(data)
        await self.drained()  # aiohttp looks at the transport's buffer only once in 64 KiB
