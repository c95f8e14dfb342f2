"""Executors in processes of their own, one per rank, on a link each.

Owns: the processes and links of a generation, and their end.  Does not know: restarts, what a step is.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import assert_never

import zmq
from msgspec import structs

from engine.actors.group import RankLost, Reports
from engine.actors.mailbox import Link
from engine.config import Config, with_pages
from engine.errors import ConfigError
from engine.links.curve import ClientKeys, Doorman, KeyPair
from engine.links.directory import SocketDirectory
from engine.links.socket import LinkError, SocketLink
from engine.messages import ExecutorAlive, ExecutorFailed, ExecutorReady, RankGroupInbox, Step, StepDone, Stop
from engine.models.checkpoint import resolve_checkpoint
from engine.processes.assignment import Assignment, Ticket, spoken_error
from engine.processes.child import Child

log = logging.getLogger(__name__)

LINK_CAPACITY = 64  # messages; with two steps in flight a handful are under way
BEATS = 4  # a rank says so many times that it is there before its silence is too long
LAST_WORDS_S = 0.05  # what a process said before it ended may arrive just after its end is seen
END_TIMEOUT_S = 4.0
KILL_TIMEOUT_S = 10.0


class ProcessPlacement:
    """max_len: longest sequence.  capacity: of an executor's mailbox.  num_ranks: tensor-parallel size.

    module: what a rank's process runs."""

    can_kill = True

    def __init__(
        self,
        *,
        config: Config,
        max_len: int,
        num_ranks: int,
        capacity: int,
        progress: bool,
        module: str = "engine.processes.executor",
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.executor=process: processes are watched in Linux's ways; use 'inline' here")
        self.silence_timeout_s = config.placement.silence_timeout_s
        self._config = config
        self._max_len = max_len
        self._num_ranks = num_ranks
        self._capacity = capacity
        self._progress = progress
        self._module = module

    def start(self, reports: Reports, num_pages: int) -> "ProcessRanks":
        """Start a process per rank.  Raises ConfigError or LinkError if their links cannot be made."""
        config = self._config if not num_pages else with_pages(self._config, num_pages)
        path = str(resolve_checkpoint(config.model.path, config.model.revision))
        config = structs.replace(config, model=structs.replace(config.model, path=path))
        assignments = [
            Assignment(
                rank=rank,
                num_ranks=self._num_ranks,
                rendezvous="",
                config=config,
                max_len=self._max_len,
                capacity=self._capacity,
                heartbeat_s=self.silence_timeout_s / BEATS,
                log_level=logging.getLogger().getEffectiveLevel(),
                progress=self._progress and not rank,
            )
            for rank in range(self._num_ranks)
        ]
        return ProcessRanks(assignments, reports, self._module)


class ProcessRanks:
    """One generation."""

    def __init__(self, assignments: Sequence[Assignment], reports: Reports, module: str) -> None:
        self._assignments = assignments
        self._reports = reports
        self._module = module
        self._connected: set[int] = set()
        self._ready: set[int] = set()
        self._context = zmq.Context()
        self._doorman = Doorman(self._context)
        self._directory: SocketDirectory | None = None
        self._sockets: list[SocketLink[RankGroupInbox]] = []
        self._children: list[Child] = []
        self._ending = False
        try:
            where = assignments[0].config.placement.link
            if where.startswith("unix"):
                base = where.removeprefix("unix").removeprefix(":")
                self._directory = SocketDirectory(Path(base) if base else None)
            if len(assignments) > 1:
                # Also where the links are TCP: these ranks are on this machine.
                self._directory = self._directory or SocketDirectory()
                rendezvous = self._directory.rendezvous()
                self._assignments = [structs.replace(one, rendezvous=rendezvous) for one in assignments]
            for assignment in self._assignments:
                self._start(assignment)
        except BaseException:
            self._let_go()
            raise
        self.links: Sequence[Link[Step]] = self._sockets

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of ranks."""
        return [child.pid for child in self._children]

    def _start(self, assignment: Assignment) -> None:
        rank, where = assignment.rank, assignment.config.placement.link
        name = f"executor{rank}"
        link: SocketLink[RankGroupInbox] = SocketLink(
            name, self._context, RankGroupInbox, partial(self._take, rank), capacity=LINK_CAPACITY
        )
        self._sockets.append(link)
        ours, theirs = KeyPair.draw(), KeyPair.draw()
        self._doorman.admit(name, frozenset((theirs.public,)))
        if where.startswith("unix"):
            assert self._directory is not None
            where = self._directory.endpoint(name)
        ticket = Ticket(rank, name, link.bind(where, ours), ClientKeys(theirs, ours.public), parent=os.getpid())
        self._children.append(Child(self._module, ticket, partial(self._ended, rank)))

    # ---- what ranks say ---------------------------------------------------------------------

    def _take(self, rank: int, message: RankGroupInbox) -> None:
        if message.rank != rank:
            log.warning("link executor%d: refused: a message of rank %d", rank, message.rank)
            return
        match message:
            case ExecutorAlive():
                if rank not in self._connected:
                    self._connected.add(rank)
                    self._sockets[rank].put(self._assignments[rank])
                    self._leave_directory()
                self._reports.heard(rank, message)
            case ExecutorReady() | StepDone():
                if isinstance(message, ExecutorReady):
                    self._ready.add(rank)
                    self._leave_directory()
                self._reports.heard(rank, message)
            case ExecutorFailed(kind=kind, message=text):
                error = spoken_error(kind, text, rank)
                self._reports.lost(RankLost(str(error), error=error))
            case _:
                assert_never(message)

    def _leave_directory(self) -> None:
        """Connected sockets need no file, and ranks that have met need no meeting place: leave nothing to clean up."""
        num_ranks = len(self._assignments)
        if self._directory is not None and len(self._connected if num_ranks == 1 else self._ready) == num_ranks:
            self._directory.remove()

    def _ended(self, rank: int, how: str) -> None:
        if not self._ending:
            loss = RankLost(f"executor{rank} {how}")
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._reports.lost, loss)

    # ---- the end ----------------------------------------------------------------------------

    async def end(self) -> None:
        """Tell every process to end after the steps it has."""
        self._ending = True
        for link in self._sockets:
            try:
                link.put(Stop())
            except LinkError as error:
                log.debug("%s", error)  # it never connected, or is on its way out
        await asyncio.gather(*(child.wait(END_TIMEOUT_S) for child in self._children))

    async def kill(self, *, stuck: bool) -> None:
        """End every process that is left, and let go of links and files."""
        self._let_go()
        for rank, child in enumerate(self._children):
            if not await child.wait(KILL_TIMEOUT_S):
                log.error("executor%d (pid %d) does not die; it holds its device", rank, child.pid)

    def _let_go(self) -> None:
        self._ending = True
        for child in self._children:
            child.kill()
        for link in self._sockets:
            link.close()
        self._doorman.close()
        if self._directory is not None:
            self._directory.remove()
        self._context.term()
