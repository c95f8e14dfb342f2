"""A worker at the other end of a link, in a process of this machine or of another one.

Owns: a process, as far as it can be known, and the link to it, and the end of both.
Does not know: restarts, what the worker does, the other workers.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol

from engine.messages import Stop
from engine.types.errors import CallboardError
from engine.types.notices import Message
from engine.workers.group import LAST_WORDS_S
from engine.workers.keys import ClientKeys
from engine.workers.link import LinkError, LinkServer
from engine.workers.messages import WorkerAlive, WorkerFailed
from engine.workers.worker import Reports, Said, Told, WorkerLost

log = logging.getLogger(__name__)

END_TIMEOUT_S = 4.0
KILL_TIMEOUT_S = 10.0


class Process(Protocol):
    """What runs at the other end, as far as it can be known from here."""

    def kill(self) -> None:
        """End it at once, where that can be done from here."""
        ...

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        ...


StartProcess = Callable[[str, ClientKeys, Callable[..., None]], Process]
"""Starts what connects to an endpoint with such keys; see ``LinkedWorker.ended`` for what is called at its end."""


class LinkedWorker(Generic[Said, Told]):
    """assignment: the first message to the worker.  server: makes the link, given where it delivers.

    Raises ConfigError or LinkError if the link cannot be made."""

    def __init__(
        self,
        name: str,
        assignment: Message,
        reports: Reports[Said],
        server: Callable[[Callable[[Any], None]], LinkServer[Any]],
        start: StartProcess,
        *,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._assignment = assignment
        self._reports = reports
        self._end_timeout_s = end_timeout_s
        self._is_connected = False
        self._ending = False
        self._server = server(self._take)
        try:
            self.process = start(self._server.endpoint, self._server.client, self.ended)
        except BaseException:
            self._server.close()
            raise

    def put(self, message: Told) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the worker takes nothing."""
        self._server.link.put(message)

    async def end(self) -> None:
        """Tell it to end after what it has."""
        self._ending = True
        try:
            self._server.link.put(Stop())
        except LinkError as error:
            log.debug("%s", error)  # it is on its way out
        await self.process.wait(self._end_timeout_s)
        await asyncio.sleep(LAST_WORDS_S)  # they are here by now, but may not have been read

    async def kill(self, *, is_stuck: bool) -> None:
        """End it, if it is left, and let go of link and files."""
        self._ending = True
        self.process.kill()
        self._server.close()
        if not await self.process.wait(KILL_TIMEOUT_S):
            log.error("%s does not die; it holds what it has", self._name)

    def _take(self, message: Any) -> None:
        """What the link has let in: what the worker says, and how it fails."""
        if isinstance(message, WorkerFailed):
            error = message.error(self._name)
            self._reports.lost(WorkerLost(str(error), error))
            return
        if isinstance(message, WorkerAlive) and not self._is_connected:
            self._is_connected = True
            self._server.link.put(self._assignment)
            self._server.leave_directory()
        self._reports.heard(message)

    def ended(self, how: str, error: CallboardError | None = None) -> None:
        """The process has ended.  how: what to say of it.  error: one that would only come again."""
        if not self._ending:
            loss = WorkerLost(f"{self._name} {how}") if error is None else WorkerLost(str(error), error)
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._reports.lost, loss)
