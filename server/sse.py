"""A response as server-sent events.

Owns: framing, headers, not running ahead of a client that reads slowly.  Does not know: what the events say.
Events are JSON without line breaks (JSON escapes them), so no text can end an event early.
"""

from collections.abc import Iterable

import msgspec
from aiohttp import web

from engine.errors import RequestError
from server.errors import error_body
from server.exchange import EXCHANGE

DONE = b"data: [DONE]\n\n"


class EventStream:
    """Nothing is sent before the first event, so that until then an error can still have a status of its own."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._encoder = msgspec.json.Encoder()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would otherwise collect the events
                **request[EXCHANGE].headers,
            }
        )

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    async def send(self, events: Iterable[msgspec.Struct]) -> None:
        """Write events; returns when the connection can take more.  Raises ConnectionError when the client is gone."""
        encode = self._encoder.encode
        await self._write(b"".join(b"data: " + encode(event) + b"\n\n" for event in events))

    async def fail(self, error: RequestError) -> None:
        """Tell an error in the stream: its status can no longer be changed."""
        await self.send([error_body(error)])

    async def end(self) -> None:
        """Say that this was all."""
        await self._write(DONE)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        if not self.started:
            await self.response.prepare(self._request)
        await self.response.write(data)
        # aiohttp looks at the transport's buffer only once in 64 KiB.
        if self._request.protocol.writing_paused:
            await self._request.writer.drain()
