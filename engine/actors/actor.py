"""The actor base: a mailbox, and the only code that may access the actor's state.

Owns: messages that arrived and are not handled yet.  Does not know: their meaning.
``put`` never waits and never refuses.  Backpressure is applied at ingress alone: it counts a request
against ``limits.max_requests`` until the engine has released it, and every capacity follows from that number.

``handle`` is a plain function from (state, message) to state and messages, so it is atomic.  Slow work runs in tasks
and comes back as a message.  ``flush`` runs once per drained batch; plans are made there.
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
    """The sending end of an actor's input: a mailbox here, a socket in another placement."""

    def put(self, message: M_contra) -> None: ...


class Deliveries:
    """Mailboxes with undelivered messages, in the order of their first ``put``.

    All of them deliver in one callback on the loop, including those that are filled meanwhile: another iteration of the
    loop polls the kernel and yields the interpreter lock to the executor's thread, which costs as much as an actor.
    """

    def __init__(self) -> None:
        self._due: deque[Mailbox[Any]] = deque()

    def add(self, mailbox: "Mailbox[Any]") -> None:
        """Add a mailbox that is not queued yet."""
        self._due.append(mailbox)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._due:
            self._due[0].deliver()
            self._due.popleft()  # only now: a queued mailbox keeps ``add`` from scheduling this method again


class Mailbox(Generic[M]):
    """FIFO of messages.  ``put`` is called on the loop's thread; the actor receives all arrived messages in one call.

    Delivery is a plain callback on the loop, not a task wake-up: 1 us a hop instead of 10.
    deliveries: shared by the actors that run together.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._messages: deque[M] = deque()
        self._deliver: Callable[[list[M]], None] | None = None
        self._due = False
        self.deliveries = Deliveries()
        self.peak = 0  # most messages delivered in one call
        self.num_taken = 0  # messages delivered in total

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> None:
        """Append a message.  More than ``capacity`` is a bug, which is logged and not raised: no request may fail."""
        self._messages.append(message)
        if len(self._messages) == self.capacity + 1:
            log.error("%s: more than %d messages queued, with %s", self.name, self.capacity, type(message).__name__)
        if not self._due and self._deliver is not None:
            self._due = True
            self.deliveries.add(self)

    def open(self, deliver: Callable[[list[M]], None]) -> None:
        """Call ``deliver`` with arrived messages from now on, first with those that are queued already."""
        self._deliver = deliver
        if self._messages:
            self._due = True
            self.deliveries.add(self)

    @property
    def is_open(self) -> bool:
        """Whether messages are delivered."""
        return self._deliver is not None

    def close(self) -> None:
        """Stop delivering; late messages are kept and never read."""
        self._deliver = None

    def deliver(self) -> None:
        """Deliver the arrived messages; called by ``deliveries``, which must not see an exception."""
        self._due = False
        if self._deliver is not None:
            messages = list(self._messages)
            self._messages.clear()
            self.num_taken += len(messages)
            if len(messages) > self.peak:
                self.peak = len(messages)
            self._deliver(messages)


class Actor(Generic[M]):
    """Base class of actors; each actor's file lists what it consumes and produces."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.inbox: Mailbox[M | Stop] = Mailbox(name, capacity)
        self._slow: asyncio.TaskGroup | None = None
        self._ended: asyncio.Future[None] | None = None
        self._stopping = False

    def handle(self, message: M) -> None:
        """Apply one message without waiting."""
        raise NotImplementedError

    def flush(self) -> None:
        """Act on the drained batch; called after every one."""

    @property
    def idle(self) -> bool:
        """Whether the actor may end after Stop; until then it continues."""
        return True

    def close(self) -> None:
        """Release the actor's resources; called exactly once, also after a crash."""

    def spawn(self, work: Coroutine[Any, Any, M | None]) -> asyncio.Task[M | None]:
        """Run slow work as a task; its result is put into the mailbox, unless the task is cancelled."""
        assert self._slow is not None, f"{self.name} spawned work before it ran"
        task = self._slow.create_task(work, name=f"{self.name}.slow")
        task.add_done_callback(self._post)
        return task

    def _post(self, done: asyncio.Task[M | None]) -> None:
        if not done.cancelled() and done.exception() is None and (message := done.result()) is not None:
            self.inbox.put(message)

    async def run(self) -> None:
        """Handle messages until Stop; an exception ends the actor and goes to its supervisor."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as self._slow:
                self.inbox.open(self._take)
                await self._ended
        finally:
            self.inbox.close()
            self.close()

    def _take(self, messages: list[M | Stop]) -> None:
        """Handle everything that arrived since the last call."""
        try:
            for message in messages:
                if isinstance(message, Stop):
                    self._stopping = True
                else:
                    self.handle(message)
            self.flush()
        except Exception as error:
            self._finish(error)
        except BaseException as error:  # sys.exit, or a panic in Rust: it would end the delivery to all other actors
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
