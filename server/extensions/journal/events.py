"""The events of a stream that can be rejoined.

Owns: their ids, and which of them a client has.  Does not know: formats of events, where they come from.
"""

from collections.abc import Iterable

import msgspec
from aiohttp import web

from server.http.operation import Framing
from server.http.sse import EventStream, Ping


class NumberedEvents(EventStream):
    """Events with ids, by which a client can go on from the last one that it has.

    num_known: how many it has, which are left out.  num_events: how many there were, with those."""

    def __init__(self, request: web.Request, *, framing: Framing, ping: Ping, stream_id: str, num_known: int) -> None:
        super().__init__(request, framing=framing, ping=ping)
        self.num_events = 0
        self._prefix = b"id: %b:" % stream_id.encode()
        self._num_known = num_known

    def write_now(self, data: bytes) -> bool:
        return self._put_now(self._numbered(data))

    def _framed(self, events: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(map(self._numbered, self._frames(events)))

    def _numbered(self, frame: bytes) -> bytes:
        self.num_events += 1
        return b"%b%d\n%b" % (self._prefix, self.num_events, frame) if self.num_events > self._num_known else b""
