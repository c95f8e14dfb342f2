"""Executors in processes of their own, one per rank, on a link each.

Owns: the processes and links of a generation, and their end.  Does not know: restarts, what a step is.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import assert_never

from msgspec import structs

from engine.actors.mailbox import Link
from engine.checkpoints.checkpoint import read_spec, resolve_checkpoint
from engine.checkpoints.fingerprint import fingerprint
from engine.config import Config, without_cluster_key
from engine.errors import CallboardError, ConfigError, EngineDied
from engine.logs import LogSettings
from engine.messages import (
    ExecutorAlive,
    ExecutorFailed,
    ExecutorReady,
    FrontDeskInbox,
    FrontWord,
    Handover,
    RankGroupInbox,
    Step,
    StepDone,
    Stop,
    TokenizerInbox,
    TokenizerPoolInbox,
    TokenizerWord,
)
from engine.workers.child import Child
from engine.workers.cluster.head import Call, Head, named
from engine.workers.executors import RankLost, Reports, Terms
from engine.workers.frontend import FrontCommand, FrontTold
from engine.workers.group import Reports as ProcessReports
from engine.workers.link import LinkError, SocketLink
from engine.workers.link_server import Switchboard
from engine.workers.messages import Assignment, FrontAssignment, Place, Ticket, TokenizerAssignment, spoken_error
from engine.workers.worker import STEPS_BEHIND, ProcessMember, Seat

log = logging.getLogger(__name__)

LINK_CAPACITY = 64  # messages; with two steps in flight a handful are under way
BEATS = 4  # a rank says so many times that it is there before its silence is too long
LAST_WORDS_S = 0.05  # what a process said before it ended may arrive just after its end is seen
END_TIMEOUT_S = 4.0
KILL_TIMEOUT_S = 10.0


class ProcessPlacement:
    """max_len: longest sequence.  capacity: of an executor's mailbox.  num_ranks: tensor-parallel size.

    module: what a rank's process runs.  head: of the machines that the ranks are on; None if they are all on this one.
    """

    can_kill = True

    def __init__(
        self,
        *,
        config: Config,
        max_len: int,
        num_ranks: int,
        capacity: int,
        progress: bool,
        module: str = "engine.workers.executor_main",
        head: Head | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.executor=process: processes are watched in Linux's ways; use 'inline' here")
        self.silence_timeout_s = config.placement.silence_timeout_s
        self.join_timeout_s = head.join_timeout_s if head is not None else 0.0
        self._config = config
        self._max_len = max_len
        self._num_ranks = num_ranks
        self._capacity = capacity
        self._progress = progress
        self._module = module
        self._head = head

    def start(self, reports: Reports, terms: Terms) -> "ProcessRanks":
        """Start a process per rank.  Raises ConfigError or LinkError if their links cannot be made."""
        config = without_cluster_key(self._config)
        path = resolve_checkpoint(config.model.path, config.model.revision)
        config = structs.replace(config, model=structs.replace(config.model, path=str(path)))
        told = "" if self._head is None else fingerprint(read_spec(path), config.model.load_format)
        assignments = [
            Assignment(
                rank=rank,
                num_ranks=self._num_ranks,
                rendezvous="",
                config=config,
                num_pages=terms.num_pages,
                most_tokens=terms.most_tokens,
                max_len=self._max_len,
                capacity=self._capacity,
                heartbeat_s=self.silence_timeout_s / BEATS,
                logs=LogSettings.here(),
                progress=self._progress and not rank,
                fingerprint=told if rank else "",
            )
            for rank in range(self._num_ranks)
        ]
        return ProcessRanks(assignments, reports, self._module, self._head)


class ProcessRanks:
    """One generation."""

    def __init__(
        self, assignments: Sequence[Assignment], reports: Reports, module: str, head: Head | None = None
    ) -> None:
        self._assignments = assignments
        self._reports = reports
        self._module = module
        self._connected: set[int] = set()
        self._sockets: list[SocketLink[RankGroupInbox]] = []
        self._children: list[Child | Seat] = []
        self._ending = False
        several = len(assignments) > 1
        self._call: Call | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if head is None:
            # Ranks meet in a directory also where the links are TCP: these are on this machine.
            self._switchboard = Switchboard(assignments[0].config.placement.link, meeting=several)
            rendezvous = self._switchboard.rendezvous
        else:
            self._call = head.call(self._lost_elsewhere)
            self._switchboard = Switchboard("unix")  # for rank 0's executor, which is on this machine
            rendezvous = self._call.rendezvous
        try:
            if several:
                self._assignments = [structs.replace(one, rendezvous=rendezvous) for one in assignments]
            for assignment in self._assignments:
                self._start(assignment, head)
            if self._call is not None and head is not None:
                self._call.begin()
                loop = asyncio.get_running_loop()
                self._deadline = loop.call_later(head.join_timeout_s, self._check_joined, head.join_timeout_s)
        except BaseException:
            self._let_go()
            raise
        self.links: Sequence[Link[Step]] = self._sockets

    @property
    def pids(self) -> list[int]:
        """The processes on this machine, in the order of ranks."""
        return [child.pid for child in self._children if isinstance(child, Child)]

    def _start(self, assignment: Assignment, head: Head | None) -> None:
        rank = assignment.rank
        name = f"executor{rank}"
        link, endpoint, keys = self._switchboard.open(
            name,
            RankGroupInbox,
            partial(self._take, rank),
            capacity=LINK_CAPACITY,
            place=self._call.link(rank) if self._call is not None and rank else None,
        )
        self._sockets.append(link)
        if self._call is not None and rank:
            self._call.add(rank, endpoint)
            self._children.append(Seat())
            return
        place = Place(head.cluster.local_rank) if head is not None else None
        ticket = Ticket(rank, name, endpoint, keys, parent=os.getpid(), place=place)
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
                    if self._call is not None and rank:
                        log.info("rank %d has joined", rank)
                    self._sockets[rank].put(self._assignments[rank])
                    self._leave_directory()
                self._reports.heard(rank, message)
            case ExecutorReady() | StepDone():
                self._reports.heard(rank, message)
            case ExecutorFailed():
                error = spoken_error(message)
                self._reports.lost(RankLost(str(error), error=error))
            case _:
                assert_never(message)

    def _leave_directory(self) -> None:
        """Connected sockets need no file: leave nothing to clean up.

        Unless ranks meet in one of these files: their library may go on asking it for as long as they are a group."""
        if len(self._connected) == len(self._assignments) and not self._switchboard.rendezvous:
            self._switchboard.leave_directory()

    def _ended(self, rank: int, how: str) -> None:
        if not self._ending:
            loss = RankLost(f"executor{rank} {how}")
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._reports.lost, loss)

    def _lost_elsewhere(self, rank: int, how: str, error: CallboardError | None) -> None:
        seat = self._children[rank]
        assert isinstance(seat, Seat)
        seat.leave()
        if error is not None and not self._ending:
            self._reports.lost(RankLost(str(error), error=error))
        else:
            self._ended(rank, how)

    def _check_joined(self, timeout_s: float) -> None:
        missing = [one.rank for one in self._assignments if one.rank not in self._connected]
        if missing and not self._ending:
            has = "have" if len(missing) > 1 else "has"
            error = EngineDied(f"{named(missing)} {has} not joined within {timeout_s:g} s")
            # They have had as long as was asked for; another generation would only wait as long again.
            self._reports.lost(RankLost(str(error), error=error, curable=False))

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
        if len(self._children) > 1 and not self._ending:
            await asyncio.sleep(LAST_WORDS_S)  # one rank's failure may be that of another, whose reason is the true one
        self._let_go()
        for rank, child in enumerate(self._children):
            if isinstance(child, Child) and not await child.wait(KILL_TIMEOUT_S):
                log.error("executor%d (pid %d) does not die; it holds its device", rank, child.pid)

    def _let_go(self) -> None:
        self._ending = True
        if self._deadline is not None:
            self._deadline.cancel()
        for child in self._children:
            child.kill()
        if self._call is not None:
            self._call.end()
        self._switchboard.close()


class ProcessTokenizers:
    """Starts them.  config: with the model's path resolved.  capacity: of a mailbox.  module: what they run."""

    def __init__(self, *, config: Config, capacity: int, module: str = "engine.workers.tokenizer_main") -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.tokenizers: processes are watched in Linux's ways; use 0 here")
        self._module = module
        self._assignment = TokenizerAssignment(
            config=config,
            # Of the link as well, which holds what the mailbox has not taken yet.
            capacity=capacity + STEPS_BEHIND,
            heartbeat_s=config.placement.silence_timeout_s / BEATS,
            logs=LogSettings.here(),
        )

    def start(
        self, name: str, number: int, reports: ProcessReports[TokenizerWord]
    ) -> ProcessMember[TokenizerWord, TokenizerInbox]:
        """Start one.  Raises ConfigError or LinkError if its link cannot be made."""
        return ProcessMember(
            name,
            number,
            self._assignment,
            reports,
            module=self._module,
            where=self._assignment.config.placement.link,
            accepts=TokenizerPoolInbox,
            capacity=self._assignment.capacity,
        )


class ProcessFronts:
    """Starts one after the other.  config: with the model's path resolved.  capacity: of its ingress's mailbox."""

    def __init__(self, *, config: Config, command: FrontCommand, max_len: int, vocab_size: int, capacity: int) -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.ingress: processes are watched in Linux's ways; use 'inline' here")
        self._config = config
        self._command = command
        self._max_len = max_len
        self._vocab_size = vocab_size
        # Of the link as well, which holds what the mailbox has not taken yet.
        self._capacity = capacity + STEPS_BEHIND

    def start(
        self, name: str, handover: Handover, reports: ProcessReports[FrontWord]
    ) -> ProcessMember[FrontWord, FrontTold]:
        """Start one.  Raises ConfigError or LinkError if its link cannot be made."""
        config, listener = self._config, self._command.listener
        assignment = FrontAssignment(
            config=config,
            max_len=self._max_len,
            vocab_size=self._vocab_size,
            has_tokenizers=config.placement.tokenizers > 0,
            listener=listener,
            capacity=self._capacity,
            heartbeat_s=config.placement.silence_timeout_s / BEATS,
            logs=LogSettings.here(),
            handover=handover,
        )
        return ProcessMember(
            name,
            0,
            assignment,
            reports,
            module=self._command.module,
            where=config.placement.link,
            accepts=FrontDeskInbox,
            capacity=self._capacity,
            keep=(listener,),
            # Its last clients may read as slowly as any.
            end_timeout_s=config.server.write_timeout_s + END_TIMEOUT_S,
        )
