"""The inside of a child process: one actor, whose peers are all at the other end of one link.

Owns: the link, the heartbeat, how the process fails.  Does not know: what the actor does, who started the process.
First the process says that it is there, then it is told what to be; it ends when it is told to, or with its actor.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import zmq

from engine.actors.actor import Actor
from engine.messages import Stop
from engine.types.errors import CallboardError
from engine.types.notices import Message
from engine.workers.child import Ticket
from engine.workers.link import LinkError, SocketLink
from engine.workers.messages import Assignment, WorkerAlive, WorkerFailed

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0  # for what is still to be sent at the end


class Outgoing:
    """Where the actor puts its messages.  failed: why one could not be sent; without it nothing goes on."""

    def __init__(self, link: SocketLink[Any]) -> None:
        self.failed: asyncio.Future[CallboardError] = asyncio.get_running_loop().create_future()
        self.link = link

    def put(self, message: Message) -> None:
        """Send."""
        try:
            self.link.put(message)
        except CallboardError as error:
            self.fail(error)

    def fail(self, error: CallboardError) -> None:
        """Only the first one counts."""
        if not self.failed.done():
            self.failed.set_result(error)


A = TypeVar("A", bound=Assignment)


class WorkerProcess(ABC, Generic[A]):
    """assignment: the type of the first message.  accepts: the union of all messages that may come.
    capacity: of the link, in messages."""

    def __init__(self, ticket: Ticket, *, assignment: type[A], accepts: Any, capacity: int) -> None:
        self._ticket = ticket
        self._assignment = assignment
        self._accepts = accepts
        self._capacity = capacity
        self._actor: Actor[Any] | None = None
        self._assigned: asyncio.Future[A | None] | None = None

    @abstractmethod
    async def build(self, assignment: A, outgoing: Outgoing) -> Actor[Any]:
        """The actor, connected.  Raises what its making raises."""

    def deliver(self, actor: Actor[Any], message: Any) -> None:
        """To the actor, or where else it belongs."""
        actor.inbox.put(message)

    async def run(self) -> int:
        """Serve until told to stop.  Returns the exit code."""
        ticket = self._ticket
        self._assigned = asyncio.get_running_loop().create_future()
        context = zmq.Context()
        link: SocketLink[Any] = SocketLink(ticket.link, context, self._accepts, self._take, capacity=self._capacity)
        try:
            link.connect(ticket.endpoint, ticket.keys)
            link.put(self._alive())
            assignment = await self._assigned
            return 0 if assignment is None else await self._serve(assignment, link)
        finally:
            link.close(LAST_WORDS_S)
            context.term()

    async def _beat(self, link: SocketLink[Any], interval_s: float) -> None:
        """Say that this process is alive, for ever."""
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(LinkError):  # nobody listens just now: then nobody would miss it either
                link.put(self._alive())

    def _alive(self) -> WorkerAlive:
        if self._actor is None:
            return WorkerAlive()
        return WorkerAlive(waiting=len(self._actor.inbox), peak=self._actor.inbox.peak)

    def _take(self, message: Any) -> None:
        assert self._assigned is not None
        if isinstance(message, self._assignment):
            if not self._assigned.done():
                self._assigned.set_result(message)
        elif self._actor is not None:
            self.deliver(self._actor, message)
        elif isinstance(message, Stop) and not self._assigned.done():
            self._assigned.set_result(None)

    async def _serve(self, assignment: A, link: SocketLink[Any]) -> int:
        name = self._ticket.link
        assignment.logs.apply(name)
        outgoing = Outgoing(link)
        heartbeat = asyncio.create_task(self._beat(link, assignment.heartbeat_s), name=f"{name}.heartbeat")
        try:
            self._actor = actor = await self.build(assignment, outgoing)
            running = asyncio.create_task(actor.run(), name=actor.name)
            await asyncio.wait((running, outgoing.failed), return_when=asyncio.FIRST_COMPLETED)
            if outgoing.failed.done():
                raise outgoing.failed.result()
            await running
        except Exception as error:
            while isinstance(error, ExceptionGroup):  # of an actor and its slow work
                error = error.exceptions[0]
            if not isinstance(error, CallboardError):
                log.error("%s fails", name, exc_info=error)
            link.put(WorkerFailed.of(error))
            return 1
        finally:
            heartbeat.cancel()
        return 0
