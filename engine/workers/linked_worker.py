"""A worker at the other end of a link, in a process of this or another machine.

Owns: a process, as far as it is reachable from here, the link to it, and the end of both.
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
from engine.workers.worker import Inbound, Outbound, Reports, WorkerLost

log = logging.getLogger(__name__)

END_TIMEOUT_S = 4.0
KILL_TIMEOUT_S = 10.0


class Process(Protocol):
    """The process at the other end, as far as it is reachable from here."""

    def kill(self) -> None:
        """Kill it at once, if that is possible from here."""
        ...

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return False on a timeout."""
        ...


StartProcess = Callable[[str, ClientKeys, Callable[..., None]], Process]
"""Starts a process that connects to an endpoint with these keys, and calls ``LinkedWorker.ended`` at its end."""


class LinkedWorker(Generic[Inbound, Outbound]):
    """A worker as its group uses it.  assignment: its first message.  server: makes the link, given its ``deliver``.

    Raises ConfigError or LinkError if the link cannot be made."""

    def __init__(
        self,
        name: str,
        assignment: Message,
        reports: Reports[Inbound],
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

    def put(self, message: Outbound) -> None:
        self._server.link.put(message)

    async def end(self) -> None:
        """Send Stop, which ends it after its queued work."""
        self._ending = True
        try:
            self._server.link.put(Stop())
        except LinkError as error:
            log.debug("%s", error)  # it is ending already
        await self.process.wait(self._end_timeout_s)
        await asyncio.sleep(LAST_WORDS_S)  # its last messages have arrived, but may be unread

    async def kill(self, *, is_stuck: bool) -> None:
        """Kill it if it still runs, and close the link and its files."""
        self._ending = True
        self.process.kill()
        self._server.close()
        if not await self.process.wait(KILL_TIMEOUT_S):
            log.error("%s does not die; its resources stay in use", self._name)

    def _take(self, message: Any) -> None:
        """Handle a message from the link: the worker's messages, and its failure."""
        if isinstance(message, WorkerFailed):
            error = message.error(self._name)
            self._reports.lost(WorkerLost(str(error), error))
            return
        if isinstance(message, WorkerAlive) and not self._is_connected:
            self._is_connected = True
            self._server.link.put(self._assignment)
            self._server.leave_directory()
        self._reports.received(message)

    def ended(self, how: str, error: CallboardError | None = None) -> None:
        """Report the end of the process.  how: the reason as text.  error: an error that a restart would repeat."""
        if not self._ending:
            loss = WorkerLost(f"{self._name} {how}") if error is None else WorkerLost(str(error), error)
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._reports.lost, loss)
