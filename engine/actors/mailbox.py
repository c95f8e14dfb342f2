"""A bounded queue that only its actor reads, and the one-method link that everyone else holds.

Owns: messages that have arrived and have not been handled.  Does not know: what they mean.
``put`` never waits and never refuses.  What holds clients back stands at the entrance: ingress counts a request
against ``limits.max_requests`` until the engine has let go of it, and every capacity follows from that number.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Link(Protocol[M_contra]):
    """Where a message is put so that its actor gets it; a mailbox here, a socket in another placement."""

    def put(self, message: M_contra) -> None: ...


class Mailbox(Generic[M]):
    """FIFO of messages.  ``put`` from the loop's own thread; the actor gets all that has arrived, in one call.

    Delivery is a plain callback on the loop, not a task that wakes up: 1 us a hop instead of 10.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._messages: deque[M] = deque()
        self._deliver: Callable[[list[M]], None] | None = None
        self._due = False
        self.peak = 0  # most messages that were handed over at once

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> None:
        """Append.  More than ``capacity`` is a bug, which is logged: it must not cost anybody a request."""
        self._messages.append(message)
        if len(self._messages) == self.capacity + 1:
            log.error("%s: more than %d messages queued, with %s", self.name, self.capacity, type(message).__name__)
        if not self._due and self._deliver is not None:
            self._due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def open(self, deliver: Callable[[list[M]], None]) -> None:
        """From now on ``deliver`` is called with what has arrived, first with what is here already."""
        self._deliver = deliver
        if self._messages:
            self._due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def close(self) -> None:
        """Deliver nothing any more; late messages are kept and never read."""
        self._deliver = None

    def _drain(self) -> None:
        self._due = False
        if self._deliver is not None:
            messages = list(self._messages)
            self._messages.clear()
            if len(messages) > self.peak:
                self.peak = len(messages)
            self._deliver(messages)
