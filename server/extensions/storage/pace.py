"""The pace of unattended work: as much runs as leaves rows free for live requests, and none that one of these waits
for.

Owns: that number, whose work is next, and what steps back.  Does not know: batches, responses, where answers go.
Work that steps back runs again later, and gives the same answer then, so all it loses is time.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from aiohttp import web

from server.backend import Backend
from server.clients import ClientRequest, Clients

T = TypeVar("T")
LOOK_EVERY_S = 0.05  # while work runs: live requests come and go without a word
FREE_SHARE = 4  # one row of so many stays free


class Turns:
    """A lock that goes round among owners: whatever one of them has in the queue, another one waits for one turn."""

    def __init__(self) -> None:
        self._is_taken = False
        self._lanes: dict[str, deque[asyncio.Future[None]]] = {}  # the owner whose turn is next is first

    @asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn of an owner, and have it within the context."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            self._lanes.setdefault(owner, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the turn had come already
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._is_taken = False
        while self._lanes and not self._is_taken:
            owner = next(iter(self._lanes))
            lane = self._lanes.pop(owner)
            while lane and not self._is_taken:
                if not (turn := lane.popleft()).done():  # else its work was cancelled
                    turn.set_result(None)
                    self._is_taken = True
            if lane:
                self._lanes[owner] = lane


class Pace:
    """Lets attempts begin when there is room, owners in turn, and of each those first that asked first."""

    def __init__(self, backend: Backend, clients: Clients) -> None:
        self._backend = backend
        self._clients = clients
        self._running: dict[asyncio.Task[Any], ClientRequest] = {}
        self._turns = Turns()
        self._ended = asyncio.Event()
        self._max_running = 0
        self._looking: asyncio.Task[None] | None = None

    async def run(
        self,
        owner: str,
        new_client: Callable[[], ClientRequest],
        attempt: Callable[[ClientRequest], Coroutine[Any, Any, T]],
    ) -> T:
        """Returns what an attempt gives that did not have to step back.  new_client: opens the choices of one."""
        while True:
            async with self._turns.of(owner):
                await self._room()
                client = new_client()
                task = asyncio.create_task(attempt(client), name="unattended")
                self._running[task] = client
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                # Also if it is done: what it has failed with is never read then, and asyncio would say so.
                await asyncio.gather(task, return_exceptions=True)
                del self._running[task]
                client.close()
                self._ended.set()
            if not task.cancelled():
                return task.result()

    async def _room(self) -> None:
        while not self._backend.ingress.ready:  # noqa: ASYNC110 - it has no event for becoming so again
            await asyncio.sleep(LOOK_EVERY_S)
        self._max_running = (await self._backend.monitor.look()).gauges.max_running
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="pace")
        while not self._has_room():
            self._ended.clear()
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._ended.wait()

    def _has_room(self) -> bool:
        ingress = self._backend.ingress
        num_open = max(ingress.num_open, len(self._running))
        if not num_open:
            return True
        limits, num_rows = self._clients.limits, self._max_running
        most = min(num_rows - -(-num_rows // FREE_SHARE), limits.max_requests // 2)
        if limits.max_requests_per_client:
            most = min(most, limits.max_requests_per_client)
        return num_open < most and not self._live_wait

    @property
    def _num_live(self) -> int:
        return self._backend.ingress.num_open - sum(client.num_open for client in self._running.values())

    @property
    def _live_wait(self) -> bool:
        """Whether a live request may be one of those that wait for a row or for pages."""
        stats = self._backend.ingress.stats
        return self._num_live > 0 and stats is not None and stats.waiting > 0

    async def _look(self) -> None:
        """Make work step back for live requests, the last one first, for as long as any runs."""
        waited = False
        while self._running:
            if self._num_live > 0:
                excess = self._backend.ingress.num_open - self._max_running
                # What waits at two looks in a row has not just come: there are rows, but no pages.
                waits, waited = waited and self._live_wait, self._live_wait
                for task in list(self._running)[::-1][: max(excess, int(waits))]:
                    task.cancel()
            await asyncio.sleep(LOOK_EVERY_S)


PACE: web.AppKey[Pace] = web.AppKey("pace", Pace)
