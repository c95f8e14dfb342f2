"""A bounded queue that only its actor reads, and the one-method link that everyone else holds.

Owns: messages that have arrived and have not been handled.  Does not know: what they mean.
``put`` never waits: every queue's capacity follows from ``limits.max_requests``, so an overflow further in is a bug.
"""

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class MailboxFull(RuntimeError):
    """More messages than a mailbox was sized for: a bug, since ingress admits no more than that."""


class Link(Protocol[M_contra]):
    """Where a message is put so that its actor gets it; a mailbox here, a socket in another placement."""

    def put(self, message: M_contra) -> None: ...


class Mailbox(Generic[M]):
    """FIFO of messages; ``put`` from the loop's own thread, ``drain`` by the actor."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._messages: deque[M] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> None:
        """Append; raises MailboxFull, which crashes the sender."""
        if len(self._messages) >= self.capacity:
            raise MailboxFull(
                f"{self.name}: {len(self._messages)} messages queued, cannot accept {type(message).__name__}"
            )
        self._messages.append(message)
        self._arrived.set()

    async def drain(self) -> list[M]:
        """Wait for at least one message, then take all of them."""
        await self._arrived.wait()
        self._arrived.clear()
        messages = list(self._messages)
        self._messages.clear()
        return messages
