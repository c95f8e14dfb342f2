"""The inside of a child process: one actor, whose peers are all reached over one link.

Owns: the link, the heartbeat, how the process fails.  Does not know: what the actor does, which process started it.
The process first reports that it is alive, then receives its assignment; it ends on Stop, or with its actor.
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

LAST_WORDS_S = 2.0  # time to send the last messages at the end


class Outgoing:
    """The link for the actor's messages.  failed: why one could not be sent, which ends the process."""

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
        """Record a failure; only the first one counts."""
        if not self.failed.done():
            self.failed.set_result(error)


A = TypeVar("A", bound=Assignment)


class WorkerProcess(ABC, Generic[A]):
    """A child process around one actor.

    assignment: the type of the first message.  accepts: the union of all messages that may arrive.
    capacity: messages of the link."""

    def __init__(self, ticket: Ticket, *, assignment: type[A], accepts: Any, capacity: int) -> None:
        self._ticket = ticket
        self._assignment = assignment
        self._accepts = accepts
        self._capacity = capacity
        self._actor: Actor[Any] | None = None
        self._assigned: asyncio.Future[A | None] | None = None

    @abstractmethod
    async def build(self, assignment: A, outgoing: Outgoing) -> Actor[Any]:
        """Return the actor, connected.  Raises what building raises."""

    def deliver(self, actor: Actor[Any], message: Any) -> None:
        """Put a message into the actor's mailbox; subclasses may route it elsewhere."""
        actor.inbox.put(message)

    async def run(self) -> int:
        """Serve until Stop.  Returns the exit code."""
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
        """Report that this process is alive, forever."""
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(LinkError):  # the other end accepts nothing now; a heartbeat may be lost
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
            while isinstance(error, ExceptionGroup):  # raised by an actor and its slow work
                error = error.exceptions[0]
            if not isinstance(error, CallboardError):
                log.error("%s fails", name, exc_info=error)
            link.put(WorkerFailed.of(error))
            return 1
        finally:
            heartbeat.cancel()
        return 0
