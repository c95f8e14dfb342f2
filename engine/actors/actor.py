"""The actor base: a mailbox and the only code that may touch the actor's state.

Owns: messages that have arrived and have not been handled.  Does not know: what they mean.
``put`` never waits and never refuses.  What holds clients back stands at the entrance: ingress counts a request
against ``limits.max_requests`` until the engine has let go of it, and every capacity follows from that number.

``handle`` is a plain function from (state, message) to state and messages, so it is atomic.  Slow work runs beside
the mailbox and comes back as a message.  ``flush`` runs once per drained batch: that is where plans are made.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from engine.messages import Stop

log = logging.getLogger(__name__)

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Link(Protocol[M_contra]):
    """Where a message is put so that its actor gets it; a mailbox here, a socket in another placement."""

    def put(self, message: M_contra) -> None: ...


class Deliveries:
    """Mailboxes that have something to deliver, in the order in which they were first put into.

    All of them deliver in one callback on the loop, also those that are put into meanwhile: another turn of the loop
    asks the kernel for events and gives the interpreter lock to the executor's thread, which costs as much as an actor.
    """

    def __init__(self) -> None:
        self._due: deque[Mailbox[Any]] = deque()

    def add(self, mailbox: "Mailbox[Any]") -> None:
        """One that is not here yet."""
        self._due.append(mailbox)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._due:
            self._due[0].deliver()
            self._due.popleft()  # only now: as long as one is here, nobody calls this again


class Mailbox(Generic[M]):
    """FIFO of messages.  ``put`` from the loop's own thread; the actor gets all that has arrived, in one call.

    Delivery is a plain callback on the loop, not a task that wakes up: 1 us a hop instead of 10.
    deliveries: those of the actors that run together.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._messages: deque[M] = deque()
        self._deliver: Callable[[list[M]], None] | None = None
        self._due = False
        self.deliveries = Deliveries()
        self.peak = 0  # most messages that were handed over at once
        self.num_taken = 0  # handed over in all

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> None:
        """Append.  More than ``capacity`` is a bug, which is logged: it must not cost anybody a request."""
        self._messages.append(message)
        if len(self._messages) == self.capacity + 1:
            log.error("%s: more than %d messages queued, with %s", self.name, self.capacity, type(message).__name__)
        if not self._due and self._deliver is not None:
            self._due = True
            self.deliveries.add(self)

    def open(self, deliver: Callable[[list[M]], None]) -> None:
        """From now on ``deliver`` is called with what has arrived, first with what is here already."""
        self._deliver = deliver
        if self._messages:
            self._due = True
            self.deliveries.add(self)

    def close(self) -> None:
        """Deliver nothing any more; late messages are kept and never read."""
        self._deliver = None

    def deliver(self) -> None:
        """Hand over what has arrived; called by ``deliveries``, which must not see an exception."""
        self._due = False
        if self._deliver is not None:
            messages = list(self._messages)
            self._messages.clear()
            self.num_taken += len(messages)
            if len(messages) > self.peak:
                self.peak = len(messages)
            self._deliver(messages)


class Actor(Generic[M]):
    """One class per actor; see each actor's file for what it consumes and produces."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.inbox: Mailbox[M | Stop] = Mailbox(name, capacity)
        self._slow: asyncio.TaskGroup | None = None
        self._ended: asyncio.Future[None] | None = None
        self._stopping = False

    def handle(self, message: M) -> None:
        """Apply one message.  Never waits."""
        raise NotImplementedError

    def flush(self) -> None:
        """Called after every drained batch."""

    @property
    def idle(self) -> bool:
        """Whether the actor may end once it was told to stop; else it goes on until it is."""
        return True

    def close(self) -> None:
        """Release what the actor holds; called exactly once, also after a crash."""

    def spawn(self, work: Coroutine[Any, Any, M | None]) -> asyncio.Task[M | None]:
        """Run slow work beside the mailbox; what it returns is put into the mailbox, unless the task is cancelled."""
        assert self._slow is not None, f"{self.name} spawned work before it ran"
        task = self._slow.create_task(work, name=f"{self.name}.slow")
        task.add_done_callback(self._post)
        return task

    def _post(self, done: asyncio.Task[M | None]) -> None:
        if not done.cancelled() and done.exception() is None and (message := done.result()) is not None:
            self.inbox.put(message)

    async def run(self) -> None:
        """Handle messages until Stop; an exception ends the actor and is its supervisor's to judge."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as self._slow:
                self.inbox.open(self._take)
                await self._ended
        finally:
            self.inbox.close()
            self.close()

    def _take(self, messages: list[M | Stop]) -> None:
        """Everything that has arrived since the last time."""
        try:
            for message in messages:
                if isinstance(message, Stop):
                    self._stopping = True
                else:
                    self.handle(message)
            self.flush()
        except Exception as error:
            self._finish(error)
        except BaseException as error:  # sys.exit, or a panic of a library in Rust: others would get nothing any more
            crash = RuntimeError(repr(error))
            crash.__cause__ = error
            self._finish(crash)
        else:
            if self._stopping and self.idle:
                self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        self.inbox.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error) if error is not None else self._ended.set_result(None)
