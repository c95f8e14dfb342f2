"""The replicas as the router sees them: where they are, whether they take requests, how busy they are.

Owns: each one's state, the choice, watching them.  Does not know: how one is started, bodies.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import aiohttp

from engine.host.timeouts import is_set_within
from engine.types.errors import CallboardError, RequestError
from server.replicas.affinity import PrefixAffinity

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.5
CHECK_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1
# The replica that has the prefix is chosen unless it has so many requests more than the least busy one, and so many
# times as many.
SLACK_REQUESTS = 8
SLACK_FACTOR = 1.5


def unavailable(message: str, code: str = "no_replica") -> RequestError:
    """A 503 after which the client may try again."""
    return RequestError(message, status=503, code=code, retry_after_s=RETRY_AFTER_S)


class State(Enum):
    """STARTING: not ready yet, or not again.  DRAINING: it finishes its requests, then it is stopped."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Fleet(Protocol):
    """What runs the replicas, each known by its number.  headers: what they want with each request."""

    size: int
    headers: Mapping[str, str]

    async def url(self, number: int) -> str:
        """Where the replica listens.  Waits until it has been started, or started again."""
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


@dataclass
class Replica:
    """One replica.  num_open: requests that it was sent and that have not ended.  num_lost: how often it was lost.

    num_starts: how often it was started again after a stop.  settled: it is ready, or cannot be started any more."""

    name: str
    url: str = ""
    state: State = State.STARTING
    num_open: int = 0
    num_sent: int = 0
    num_lost: int = 0
    num_starts: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as open for as long as the context lasts."""
        self.num_open += 1
        self.num_sent += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()


class Group(Protocol):
    """All there are of something that requests can be sent to.  noun: what one of them is called."""

    noun: str

    @property
    def all(self) -> Sequence[Replica]: ...

    def lose(self, replica: Replica, reason: object, url: str = "") -> None:
        """See ``Replicas``."""


class Choice(Protocol):
    """Who may take a request.  See ``Replicas``."""

    num_resumed: int

    @property
    def is_leaving(self) -> bool: ...

    def choose(self, blocks: list[bytes], besides: list[Replica]) -> Replica: ...

    def lose(self, replica: Replica, reason: object, url: str = "") -> None: ...


class Replicas:
    """All replicas.  Run ``watch`` as a task for each.  drain_timeout_s: what a replica gets to finish its requests.

    num_requests: that found a replica, a stream that goes on elsewhere once more; num_with_prefix: of these, those
    that went where their prompt's beginning had gone before.  num_resumed: streams that went on elsewhere.
    is_leaving: all of them end, and so does the router."""

    noun = "replica"

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, affinity: PrefixAffinity, drain_timeout_s: float
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

    def choose(self, blocks: list[bytes], besides: list[Replica]) -> Replica:
        """The replica that a request goes to: the one that has its prefix, unless that is far busier than another.

        besides: those that were tried.  Raises RequestError, a 503, if none is left."""
        ready = {one.name: one for one in self.all if one.state is State.READY and one not in besides}
        if not ready:
            raise unavailable("no replica can take this request now")
        least = min(ready.values(), key=lambda one: (one.num_open, one.num_sent))
        name, _ = self._affinity.find(blocks, ready)
        chosen = ready[name] if name is not None else least
        if chosen.num_open > max(least.num_open + SLACK_REQUESTS, least.num_open * SLACK_FACTOR):
            chosen = least
        if not besides:
            self.num_requests += 1
            self.num_with_prefix += chosen.name == name
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

    async def watch(self, replica: Replica) -> None:
        """Keep finding out where a replica is and whether it is ready."""
        while True:
            if replica.state is State.STARTING:
                await self._find(replica)
            if replica.state in (State.STARTING, State.READY):
                await self._check(replica)
            await asyncio.sleep(CHECK_EVERY_S)

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
