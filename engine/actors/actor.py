"""The actor base: a mailbox and the only code that may touch the actor's state.

``handle`` is a plain function from (state, message) to state and messages, so it is atomic.  Slow work runs beside
the mailbox and comes back as a message.  ``flush`` runs once per drained batch: that is where plans are made.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from engine.actors.mailbox import Mailbox
from engine.messages import Stop

M = TypeVar("M")


class Actor(Generic[M]):
    """One class per actor; see each actor's file for what it consumes and produces."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.inbox: Mailbox[M | Stop] = Mailbox(name, capacity)
        self._slow: asyncio.TaskGroup | None = None

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

    def spawn(self, work: Coroutine[Any, Any, M | None]) -> None:
        """Run slow work beside the mailbox; what it returns is put into the mailbox."""
        assert self._slow is not None, f"{self.name} spawned work before it ran"
        self._slow.create_task(self._post(work), name=f"{self.name}.slow")

    async def _post(self, work: Coroutine[Any, Any, M | None]) -> None:
        if (message := await work) is not None:
            self.inbox.put(message)

    async def run(self) -> None:
        """Handle messages until Stop; an exception ends the actor and is its supervisor's to judge."""
        stopping = False
        try:
            async with asyncio.TaskGroup() as self._slow:
                while not (stopping and self.idle):
                    for message in await self.inbox.drain():
                        if isinstance(message, Stop):
                            stopping = True
                        else:
                            self.handle(message)
                    self.flush()
        finally:
            self.close()
