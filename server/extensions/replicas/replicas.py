"""The replicas as the router sees them: whether each takes requests, which one gets a request, and their restarts.

Owns: each one's state, the choice, the watch over them.  Does not know: how one is started, bodies.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

import aiohttp
import msgspec

from engine.host.timeouts import is_set_within
from engine.types.errors import CallboardError
from server.extensions.replicas.held import PATH
from server.extensions.replicas.routing import Offer, PrefixRouting, RoutingPolicy
from server.proxy.affinity import HeldBlocks, PrefixAffinity
from server.proxy.replica import CHECK_TIMEOUT_S, Replica, State, unavailable

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.5
MOST_CHECKS_PER_S = 50  # of all replicas together, each about 0.7 ms of the router's time


class Fleet(Protocol):
    """A group of running replicas, each known by its number.  headers: those that they want with each request."""

    size: int
    headers: Mapping[str, str]

    async def url(self, number: int) -> str:
        """Returns where the replica listens.  Waits until it has been started, or started again."""
        ...

    async def stop(self, number: int) -> None:
        """End a replica, which does not come back by itself."""
        ...

    async def start(self, number: int) -> None:
        """Start a replica that was stopped."""
        ...

    def close(self) -> None:
        """End them all."""
        ...


@runtime_checkable
class LastingFleet(Fleet, Protocol):
    """A fleet whose replicas other routers use too, so that they outlive each of them."""

    async def is_running(self, number: int) -> bool:
        """Returns whether another router has started a replica that was stopped."""
        ...


class Replicas:
    """All replicas.  Run ``watch`` and ``follow`` as tasks for each.

    drain_timeout_s: what a replica gets to finish its requests.  routing: by the prompt's beginning unless given.

    num_requests: that found a replica, a stream that goes on elsewhere once more; num_with_prefix: of these, those
    that went where their prompt's beginning had gone before.  num_resumed: streams that went on elsewhere.
    is_leaving: all of them end, and so does the router."""

    noun = "replica"

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        affinity: PrefixAffinity,
        drain_timeout_s: float,
        routing: RoutingPolicy | None = None,
    ) -> None:
        self.all = [Replica(f"replica{number}") for number in range(fleet.size)]
        self.num_requests = 0
        self.num_with_prefix = 0
        self.num_resumed = 0
        self.is_leaving = False
        self._drain_timeout_s = drain_timeout_s
        self._fleet = fleet
        self._session = session
        self._affinity = affinity
        self._routing = routing or PrefixRouting()

    def choose(self, blocks: list[bytes], besides: list[Replica]) -> Replica:
        """The replica that a request goes to, by the routing policy.

        besides: those that were tried.  Raises RequestError, a 503, if none is left."""
        ready = {one.name: one for one in self.all if one.state is State.READY and one not in besides}
        if not ready:
            raise unavailable("no replica can take this request now")
        chosen = self._routing.choose(Offer(blocks, ready, self._affinity))
        if not besides:
            self.num_requests += 1
            self.num_with_prefix += self._affinity.has_beginning(blocks, chosen.name)
        self._affinity.note(blocks, chosen.name)
        return chosen

    def lose(self, replica: Replica, reason: object, url: str = "") -> None:
        """Send no request to a replica that does not answer, until ``watch`` has found it again.

        url: where it did not; it may be somewhere else by now, and well."""
        if replica.state is State.READY and url in ("", replica.url):
            log.warning("%s is lost: %s", replica.name, reason)
            self._set_starting(replica)
            replica.num_lost += 1
            self._affinity.forget(replica.name)

    async def drain(self, replica: Replica) -> None:
        """Send a replica nothing new, wait for what it has, and stop it.

        What it has not finished in time goes on elsewhere, as if the replica had been lost."""
        log.info("%s is drained: %d requests are open", replica.name, replica.num_open)
        replica.state = State.DRAINING
        replica.settled.clear()
        if replica.num_open:
            await is_set_within(self._drain_timeout_s, replica.idle)
        await self._fleet.stop(self.all.index(replica))
        self._affinity.forget(replica.name)
        replica.state = State.STOPPED
        log.info("%s is stopped: %d requests were open", replica.name, replica.num_open)

    async def leave(self, replica: Replica) -> None:
        """End a replica with its only router; one that others use finishes what this router has sent it."""
        if not isinstance(self._fleet, LastingFleet):
            await self.drain(replica)
        elif replica.num_open:
            await replica.idle.wait()

    async def undrain(self, replica: Replica) -> None:
        """Send a replica requests again, once it is ready.  It is started if it was stopped; no drain of it may run."""
        if self.is_leaving:
            return
        if replica.state is State.STOPPED:
            await self._fleet.start(self.all.index(replica))
            replica.num_starts += 1
        if replica.state in (State.STOPPED, State.DRAINING):
            self._set_starting(replica)
            log.info("%s comes back", replica.name)

    async def restart(self, replicas: list[Replica]) -> None:
        """Drain, stop and start replicas, one after another: each is ready again before the next one is drained.

        Raises CallboardError if one does not come back; those behind it are not touched."""
        for replica in replicas:
            if replica.state is not State.STOPPED:
                await self.drain(replica)
            await self.undrain(replica)
            await replica.settled.wait()
            if replica.state is State.STOPPED:
                raise CallboardError(f"{replica.name} cannot be started; those behind it were left as they are")

    @property
    def _check_every_s(self) -> float:
        """The time between two checks of a replica: each of many is checked less often, and a request sees its loss."""
        return max(CHECK_EVERY_S, len(self.all) / MOST_CHECKS_PER_S)

    async def watch(self, replica: Replica) -> None:
        """Keep finding out where a replica is and whether it is ready."""
        while True:
            if replica.state is State.STOPPED and await self._is_running(replica):
                log.info("%s was started by another router", replica.name)
                self._set_starting(replica)
            if replica.state is State.STARTING:
                await self._find(replica)
            if replica.state in (State.STARTING, State.READY):
                await self._check(replica)
            await asyncio.sleep(self._check_every_s)

    async def follow(self, replica: Replica) -> None:
        """Keep learning which prompts a replica holds."""
        epoch, version = "", 0
        while True:
            if replica.state is State.READY:
                timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
                url = f"{replica.url}{PATH}?epoch={epoch}&version={version}"
                with suppress(aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):  # ``watch`` finds out why
                    async with self._session.get(url, timeout=timeout) as response:
                        response.raise_for_status()
                        report = msgspec.msgpack.decode(await response.read(), type=HeldBlocks)
                    if replica.state is State.READY and url.startswith(replica.url):
                        self._affinity.learn(replica.name, report)
                        epoch, version = report.epoch, report.version
                        continue
            epoch, version = "", 0
            await asyncio.sleep(self._check_every_s)

    async def _is_running(self, replica: Replica) -> bool:
        if not isinstance(self._fleet, LastingFleet):
            return False
        try:
            return await self._fleet.is_running(self.all.index(replica))
        except Exception as error:  # of a cluster that cannot be asked now
            log.warning("whether %s runs is not known: %s", replica.name, error)
            return False

    async def _find(self, replica: Replica) -> None:
        num_starts = replica.num_starts
        try:
            replica.url = await self._fleet.url(self.all.index(replica))
        except Exception:
            if replica.state is State.STARTING and replica.num_starts == num_starts:
                log.exception("%s cannot be started any more; the others go on", replica.name)
                replica.state = State.STOPPED
                replica.settled.set()

    def _set_starting(self, replica: Replica) -> None:
        replica.state = State.STARTING
        replica.settled.clear()

    async def _check(self, replica: Replica) -> None:
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        try:
            async with self._session.get(f"{replica.url}/ready", timeout=timeout) as response:
                ready = response.status == 200
        except (aiohttp.ClientError, TimeoutError) as error:
            self.lose(replica, repr(error))
            return
        if ready and replica.state is State.STARTING:
            log.info("%s is ready at %s", replica.name, replica.url)
            replica.state = State.READY
            replica.settled.set()
        elif not ready and replica.state is State.READY:
            self.lose(replica, "it is not ready any more")
