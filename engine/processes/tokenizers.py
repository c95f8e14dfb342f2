"""Tokenizers in processes of their own, on a link each, as the pool's desks hold them.

Owns: a process and its link, and their end.  Does not know: restarts, requests, the other processes.
"""

import asyncio
import logging
import os
import sys
from typing import assert_never

from msgspec import structs

from engine.actors.tenure import Reports, TokenizerLost
from engine.config import Config
from engine.errors import ConfigError
from engine.links.socket import LinkError
from engine.logs import LogSettings
from engine.messages import (
    Abort,
    Admit,
    Deltas,
    Failed,
    Stop,
    TokenizerAlive,
    TokenizerFailed,
    TokenizerInbox,
    TokenizerPoolInbox,
    TokenizerReady,
)
from engine.models.checkpoint import resolve_checkpoint
from engine.processes.assignment import Ticket, TokenizerAssignment, spoken
from engine.processes.child import Child
from engine.processes.switchboard import Switchboard

log = logging.getLogger(__name__)

STEPS_BEHIND = 4096  # so many steps' tokens a busy process may be behind before it is given up
BEATS = 4  # a process says so many times that it is there before its silence is too long
LAST_WORDS_S = 0.05  # what a process said before it ended may arrive just after its end is seen
END_TIMEOUT_S = 4.0
KILL_TIMEOUT_S = 10.0


class ProcessTokenizers:
    """Starts them.  capacity: of a tokenizer's mailbox.  module: what a process runs."""

    def __init__(self, *, config: Config, capacity: int, module: str = "engine.processes.tokenizer") -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.tokenizers: processes are watched in Linux's ways; use 0 here")
        path = str(resolve_checkpoint(config.model.path, config.model.revision))
        config = structs.replace(config, model=structs.replace(config.model, path=path))
        self._module = module
        self._assignment = TokenizerAssignment(
            config=config,
            # Of the link as well, which holds what the mailbox has not taken yet.
            capacity=capacity + STEPS_BEHIND,
            heartbeat_s=config.placement.silence_timeout_s / BEATS,
            logs=LogSettings.here(),
        )

    def start(self, name: str, number: int, reports: Reports) -> "ProcessTokenizer":
        """Start one.  Raises ConfigError or LinkError if its link cannot be made."""
        return ProcessTokenizer(name, number, self._assignment, reports, self._module)


class ProcessTokenizer:
    """One process, from its start to its end."""

    def __init__(self, name: str, number: int, assignment: TokenizerAssignment, reports: Reports, module: str) -> None:
        self._name = name
        self._assignment = assignment
        self._reports = reports
        self._is_connected = False
        self._ending = False
        where = assignment.config.placement.link
        if where.startswith("tcp"):
            where = f"{where.rpartition(':')[0]}:0"  # there are several of us, and a port is good for one
        self._switchboard = Switchboard(where)
        try:
            self._link, endpoint, keys = self._switchboard.open(
                name, TokenizerPoolInbox, self._take, capacity=assignment.capacity
            )
            ticket = Ticket(number, name, endpoint, keys, parent=os.getpid())
            self._child = Child(module, ticket, self._ended)
        except BaseException:
            self._switchboard.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def put(self, message: TokenizerInbox) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the process takes nothing."""
        self._link.put(message)

    async def end(self) -> None:
        """Tell it to end after what it has."""
        self._ending = True
        try:
            self._link.put(Stop())
        except LinkError as error:
            log.debug("%s", error)  # it is on its way out
        await self._child.wait(END_TIMEOUT_S)
        # Its last words are here by now, but may not have been read.
        await asyncio.sleep(LAST_WORDS_S)

    async def kill(self) -> None:
        """End it, if it is left, and let go of link and files."""
        self._ending = True
        self._child.kill()
        self._switchboard.close()
        if not await self._child.wait(KILL_TIMEOUT_S):
            log.error("%s (pid %d) does not die", self._name, self.pid)

    def _take(self, message: TokenizerPoolInbox) -> None:
        match message:
            case TokenizerAlive():
                if not self._is_connected:
                    self._is_connected = True
                    self._link.put(self._assignment)
                    # A connected socket needs no file: leave nothing to clean up.
                    self._switchboard.leave_directory()
                self._reports.heard(message)
            case Admit() | Abort() | Deltas() | Failed() | TokenizerReady():
                self._reports.heard(message)
            case TokenizerFailed(kind, text):
                error = spoken(kind, text, self._name)
                self._reports.lost(TokenizerLost(str(error), error))
            case _:
                assert_never(message)

    def _ended(self, how: str) -> None:
        if not self._ending:
            loss = TokenizerLost(f"{self._name} {how}")
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._reports.lost, loss)
