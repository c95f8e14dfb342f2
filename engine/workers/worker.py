"""A tokenizer or a front in a process of its own, on a link of its own, as the actor's desk holds it.

Owns: a process and its link, and their end.  Does not know: restarts, requests, the other processes.
"""

import asyncio
import logging
import os
from typing import Any, Generic

from engine.messages import FrontAlive, FrontFailed, Message, Stop, TokenizerAlive, TokenizerFailed
from engine.workers.child import Child
from engine.workers.group import ProcessLost, Reports, Told, Word
from engine.workers.link import LinkError
from engine.workers.link_server import Switchboard
from engine.workers.messages import Ticket, spoken

log = logging.getLogger(__name__)

STEPS_BEHIND = 4096  # so many steps' output a busy process may be behind before it is given up
BEATS = 4  # a process says so many times that it is there before its silence is too long
LAST_WORDS_S = 0.05  # what a process said before it ended may arrive just after its end is seen
END_TIMEOUT_S = 4.0
KILL_TIMEOUT_S = 10.0


class ProcessMember(Generic[Word, Told]):
    """One process, from its start to its end.

    module: what it runs.  where: its link waits, as ``placement.link`` says it.  accepts: the union of what it says.
    assignment: the first message to it.  capacity: of the link, in messages.  keep: descriptors that it inherits.
    Raises ConfigError or LinkError if its link cannot be made."""

    def __init__(
        self,
        name: str,
        number: int,
        assignment: Message,
        reports: Reports[Word],
        *,
        module: str,
        where: str,
        accepts: Any,
        capacity: int,
        keep: tuple[int, ...] = (),
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._assignment = assignment
        self._reports = reports
        self._end_timeout_s = end_timeout_s
        self._is_connected = False
        self._ending = False
        if where.startswith("tcp"):
            where = f"{where.rpartition(':')[0]}:0"  # there are several of us, and a port is good for one
        self._switchboard = Switchboard(where)
        try:
            self._link, endpoint, keys = self._switchboard.open(name, accepts, self._take, capacity=capacity)
            ticket = Ticket(number, name, endpoint, keys, parent=os.getpid())
            self._child = Child(module, ticket, self._ended, keep=keep)
        except BaseException:
            self._switchboard.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def put(self, message: Told) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the process takes nothing."""
        self._link.put(message)

    async def end(self) -> None:
        """Tell it to end after what it has."""
        self._ending = True
        try:
            self._link.put(Stop())
        except LinkError as error:
            log.debug("%s", error)  # it is on its way out
        await self._child.wait(self._end_timeout_s)
        # Its last words are here by now, but may not have been read.
        await asyncio.sleep(LAST_WORDS_S)

    async def kill(self) -> None:
        """End it, if it is left, and let go of link and files."""
        self._ending = True
        self._child.kill()
        self._switchboard.close()
        if not await self._child.wait(KILL_TIMEOUT_S):
            log.error("%s (pid %d) does not die", self._name, self.pid)

    def _take(self, message: Any) -> None:
        """What the link has let in: words, and how the process fails."""
        match message:
            case TokenizerFailed(kind, text) | FrontFailed(kind, text):
                error = spoken(kind, text, self._name)
                self._reports.lost(ProcessLost(str(error), error))
                return
            case TokenizerAlive() | FrontAlive() if not self._is_connected:
                self._is_connected = True
                self._link.put(self._assignment)
                # A connected socket needs no file: leave nothing to clean up.
                self._switchboard.leave_directory()
        self._reports.heard(message)

    def _ended(self, how: str) -> None:
        if not self._ending:
            loss = ProcessLost(f"{self._name} {how}")
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._reports.lost, loss)


class Seat:
    """Taken until its rank is said to have left, or is given up."""

    def __init__(self) -> None:
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Its process has ended."""
        self._left.set()

    def kill(self) -> None:
        """Wait for it no longer: it is its joiner that ends it, and before it starts another one."""
        self._left.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        try:
            await asyncio.wait_for(self._left.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
