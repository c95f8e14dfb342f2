"""Connections without sockets: the client session of a router, answers of replicas, and the writer of a client.

Owns: which bytes go where, and what fails when a replica or the way to it is gone.  Does not know: what bytes say.
The router's own code calls these in the place of aiohttp's, with the same exceptions.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from engine.types.errors import CallboardError
from server.extensions.chaos.sim.failures import SimIncorrect
from server.proxy.pieces import BodyPieces


class Peer(Protocol):
    """A server that a session reaches.  is_reachable: whether it is there and the way to it is open."""

    @property
    def is_reachable(self) -> bool: ...

    async def answer(self, method: str, path: str, body: bytes) -> "SimAnswer":
        """Answer a request."""
        ...


class SimAnswer:
    """An answer that comes in pieces.  abandon: called if its reader leaves before the end."""

    def __init__(
        self,
        status: int,
        content_type: str,
        pieces: list[bytes] | None = None,
        abandon: Callable[[], None] | None = None,
    ) -> None:
        self.status = status
        self.headers: CIMultiDict[str] = CIMultiDict({"Content-Type": content_type})
        self.content = self
        self._abandon = abandon
        self._pieces = deque(pieces or ())
        self._is_over = pieces is not None
        self._is_cut = False
        self._news = asyncio.Event()

    def write(self, piece: bytes) -> None:
        """Send a piece."""
        self._pieces.append(piece)
        self._news.set()

    def end(self) -> None:
        """Send nothing more."""
        self._is_over = True
        self._news.set()

    def cut(self) -> None:
        """Let the connection break: what has not been read is lost."""
        self._is_cut = True
        self._pieces.clear()
        self._news.set()

    async def readany(self) -> bytes:
        """Return what has come, b'' at the end."""
        while not self._pieces and not self._is_over and not self._is_cut:
            self._news.clear()
            await self._news.wait()
        if self._is_cut:
            raise aiohttp.ClientPayloadError("the connection broke")
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole

    async def read(self) -> bytes:
        """Return everything."""
        parts = []
        while part := await self.readany():
            parts.append(part)
        return b"".join(parts)

    def raise_for_status(self) -> None:
        """Raise for an answer that is an error."""
        if self.status >= 400:
            raise aiohttp.ClientConnectionError(f"status {self.status}")

    async def __aenter__(self) -> "SimAnswer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._abandon is not None:
            self._abandon()


class _Getting:
    """A GET that is made when its context is entered, and given up after a while."""

    def __init__(self, session: "SimSession", url: str, timeout_s: float) -> None:
        self._session, self._url, self._timeout_s = session, url, timeout_s

    async def __aenter__(self) -> SimAnswer:
        async with asyncio.timeout(self._timeout_s):
            return await self._session.request("GET", URL(self._url))

    async def __aexit__(self, *_: object) -> None:
        pass


class SimSession:
    """The session of one router.  delay_s: returns the time that a request takes to a peer."""

    def __init__(self, peers: Mapping[str, Peer], delay_s: Callable[[str], float]) -> None:
        self._peers = peers
        self._delay_s = delay_s
        self._gone: set[str] = set()  # peers that a request has found gone, and that have not been ready since

    def get(self, url: str, timeout: aiohttp.ClientTimeout) -> _Getting:
        """Return what makes a GET."""
        return _Getting(self, url, timeout.total or 5.0)

    async def request(self, method: str, url: URL, data: BodyPieces | None = None, **_: Any) -> SimAnswer:
        """Send a request and return the beginning of its answer."""
        name = url.host or ""
        if method == "POST" and name in self._gone:
            raise SimIncorrect(f"a router sends a request to {name}, which it has found gone and not ready since")
        await asyncio.sleep(self._delay_s(name))
        peer = self._peers[name]
        if not peer.is_reachable:
            self._gone |= {name} if method == "POST" else set()
            raise aiohttp.ClientConnectionError(f"nothing answers at {name}")
        body = b"" if data is None else await data.as_bytes()
        answer = await peer.answer(method, url.raw_path_qs, body)
        if url.path == "/ready" and answer.status == 200:
            self._gone.discard(name)
        return answer


class ClientWriter:
    """The place of a client's connection.  take: gets the bytes of the body of its response."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self.is_closed = False
        self.length = self.output_size = self.buffer_size = 0

    async def write_headers(self, status_line: str, headers: Any) -> None:
        """Drop the headers."""

    def send_headers(self) -> None:
        """Drop the headers."""

    async def write(self, chunk: bytes) -> None:
        """Deliver a part of the body."""
        if self.is_closed:
            raise CallboardError("the client has gone")
        self._take(bytes(chunk))

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Deliver the end of the body."""
        if chunk:
            await self.write(chunk)

    async def drain(self) -> None:
        """Wait for nothing: the client reads at once."""

    def enable_chunking(self) -> None:
        """Frame nothing."""

    def enable_compression(self, *_: Any) -> None:
        """Compress nothing."""
