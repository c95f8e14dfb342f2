"""The supervisor: it runs every actor and ends them all, in order, after the first crash.

Owns: the actors' tasks and why the engine ended.  Does not know: what the actors do, how they are built.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from engine.actors.actor import Actor, Deliveries
from engine.messages import Stop
from engine.types.errors import CallboardError, EngineDied

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class Entrance(Protocol):
    """The actor that admits requests: ingress, or its replacement.

    became_ready: requests can be served.  draining: it accepts no more."""

    became_ready: asyncio.Event

    @property
    def draining(self) -> bool: ...

    def drain(self) -> None:
        """Accept no more requests."""
        ...

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        ...

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if the time ran out first."""
        ...

    def abort_all(self) -> None:
        """Cancel every open request with an error to its client."""
        ...

    def fail_all(self, error: EngineDied) -> None:
        """End every open request with the reason, and accept no more."""
        ...


class Supervisor:
    """Runs actors one-for-all: the first crash ends every actor and every open request.

    actors: in the order in which they are stopped, upstream first, so that no message is lost.
    ``died`` is set when one has crashed, ``stopped`` when all have ended."""

    def __init__(self, actors: Sequence[Actor[Any]], entrance: Entrance) -> None:
        self.died: EngineDied | None = None
        self.stopped = asyncio.Event()
        self._actors = actors
        self._entrance = entrance
        self._cause: BaseException | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run the actors and wait until the model is loaded.  Raises what the loading raised."""
        self._supervising = asyncio.create_task(self._supervise(), name="supervisor")
        ready = asyncio.create_task(self._entrance.became_ready.wait(), name="ready")
        await asyncio.wait((ready, self._supervising), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            if isinstance(self._cause, CallboardError):
                raise self._cause
            raise self.died or EngineDied("the engine was stopped while it started")

    async def wait(self) -> None:
        """Wait until the engine has ended.  Raises EngineDied if an actor crashed."""
        await self.stopped.wait()
        if self.died is not None:
            raise self.died

    async def _supervise(self) -> None:
        """Run all actors; the first crash ends every actor and every open request."""
        deliveries = Deliveries()
        try:
            async with asyncio.TaskGroup() as group:
                for actor in self._actors:
                    actor.inbox.deliveries = deliveries
                    self._tasks[actor.name] = group.create_task(self._watch(actor), name=actor.name)
        except* Exception:
            assert self.died is not None
            self._entrance.fail_all(self.died)
        finally:
            self.stopped.set()

    async def _watch(self, actor: Actor[Any]) -> None:
        try:
            await actor.run()
        except Exception as error:
            if self.died is None:
                self._cause = cause = _innermost(error)
                # A group of workers already names the executor and the number of its losses.
                died = cause if isinstance(cause, EngineDied) else None
                self.died = died or EngineDied(f"{actor.name} crashed: {type(cause).__name__}: {cause}")
                if not isinstance(self._cause, CallboardError):
                    log.error("%s", self.died, exc_info=self._cause)
            raise

    async def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let open ones finish for a while, cancel the rest, then end the actors in order."""
        if self._supervising is None:
            return
        self._entrance.drain()
        if not await self._entrance.wait_idle(drain_timeout_s):
            log.warning("%d requests still open after %g s are cancelled", self._entrance.num_open, drain_timeout_s)
            self._entrance.abort_all()
        for actor in self._actors:
            task = self._tasks.get(actor.name)
            if task is not None and not task.done():
                actor.inbox.put(Stop())
                await asyncio.wait((task,), timeout=STOP_TIMEOUT_S)
        self._supervising.cancel()
        await asyncio.wait((self._supervising,))
        self.stopped.set()


def _innermost(error: BaseException) -> BaseException:
    """Return the cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
