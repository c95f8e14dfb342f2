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
        else:
            if self._stopping and self.idle:
                self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        self.inbox.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error) if error is not None else self._ended.set_result(None)
