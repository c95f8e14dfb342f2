"""A replica without an engine, on a port of its own, that answers as its test sets it: the router sees no other."""

import asyncio
from collections import Counter
from typing import ClassVar

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from server.http.exchange import USAGE_HEADER
from server.proxy.affinity import HeldBlocks


class FakeReplica:
    """A replica without an engine.

    behaviour: 'answer', 'stream', 'full' (429), 'die' (cut the connection), 'die late' (after a first event),
    'lie late' (then with a mark that says nothing)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour = "answer"
        self.ready = True
        self.bodies: list[bytes] = []
        self.headers: list[CIMultiDictProxy[str]] = []
        self.num_left = 0  # requests whose client went away
        self.hold = asyncio.Event()
        self.hold.set()
        self.held: list[bytes] = []
        self.seen: Counter[str] = Counter()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/held_blocks", self._held),
                web.route("*", "/{path:.*}", self._handle),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        # A connection from before may outlast the listening socket for a moment.
        return web.Response(status=200 if self.ready and self._runner is not None else 503)

    async def _held(self, request: web.Request) -> web.Response:
        """Report all that it holds, each time."""
        await asyncio.sleep(0.005)
        report = HeldBlocks("", 0, True, self.held, [])
        return web.Response(body=msgspec.msgpack.encode(report))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append(request.headers)
        self.seen[request.path_qs] += 1
        assert request.transport is not None
        if self.behaviour == "die":
            request.transport.abort()
            return web.Response()
        if self.behaviour == "full":
            return web.json_response({"error": "full"}, status=429, headers={"Retry-After": "7"})
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        if self.behaviour == "answer":
            headers = {"X-Own": "yes", USAGE_HEADER: "5 7"}
            return web.json_response({"from": self.name}, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n: 0 01000000 0 3 1\n\n")
        if self.behaviour == "die late":
            await asyncio.sleep(0.05)
            request.transport.abort()
            return response
        if self.behaviour == "lie late":
            await response.write(b"data: 2\n\n: 0 01\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class FakeFleet:
    """A ``Fleet`` of such replicas."""

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, size: int) -> None:
        self.size = size
        self.replicas = [FakeReplica(f"fake{number}") for number in range(size)]
        self.stopped: list[int] = []
        self.started: list[int] = []

    async def url(self, number: int) -> str:
        if not self.replicas[number].url:
            await self.replicas[number].start()
        return self.replicas[number].url

    async def stop(self, number: int) -> None:
        self.stopped.append(number)
        await self.replicas[number].stop()

    async def start(self, number: int) -> None:
        self.started.append(number)
        self.replicas[number].url = ""

    def close(self) -> None:
        """Do nothing: no cluster is left."""

    async def lose(self, number: int) -> None:
        """The replica dies; ``url`` starts it again, somewhere else."""
        await self.replicas[number].stop()
        self.replicas[number].url = ""


class FakeLastingFleet(FakeFleet):
    """A fleet that another router uses too.  running: replicas that it has started again."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.running: set[int] = set()

    async def is_running(self, number: int) -> bool:
        return number in self.running
