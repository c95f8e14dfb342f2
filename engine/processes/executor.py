"""The process of one executor: ``python -m engine.processes.executor``, started by the engine and by nobody else.

Owns: its life, from the ticket on standard input to its exit code.  Does not know: other ranks, restarts.
It ignores SIGINT and SIGTERM: a terminal sends them to every process of the group, and it is the parent who decides
when an executor ends.  It ends when it is told to, when it fails, and when its parent dies.
"""

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import assert_never

import msgspec
import uvloop
import zmq

from engine.actors.executor import Executor, Runner
from engine.errors import CallboardError
from engine.execution.shrinking import Shrinking
from engine.links.socket import LinkError, SocketLink
from engine.messages import ExecutorAlive, ExecutorFailed, ExecutorReady, Step, StepDone, Stop
from engine.processes.assignment import SPOKEN, Assignment, ExecutorProcessInbox, Ticket
from engine.processes.parent import die_with

log = logging.getLogger(__name__)

Load = Callable[[Assignment], Runner]
MAX_TICKET_BYTES = 1 << 16
CAPACITY = 64  # of the link, in messages; with two steps in flight a handful are under way
LAST_WORDS_S = 2.0  # for what is still to be sent at the end


def main(load: Load) -> None:
    """Read the ticket, serve, and leave without the ceremonies of an interpreter: a device may hang in them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent had blocked them until here
    ticket = read_ticket(sys.stdin.fileno())
    if ticket.parent:
        die_with(ticket.parent, sys.stdin.fileno())
    code = uvloop.run(ExecutorProcess(ticket, load).run())
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def read_ticket(pipe: int) -> Ticket:
    """The ticket: its length as four bytes, then itself.  Ends the process if none comes."""
    with os.fdopen(os.dup(pipe), "rb", buffering=0) as stream:
        (length,) = struct.unpack("<I", stream.read(4) or sys.exit("callboard executor: started without a ticket"))
        if length > MAX_TICKET_BYTES:
            sys.exit(f"callboard executor: a ticket of {length} bytes")
        return msgspec.msgpack.decode(stream.read(length), type=Ticket)


class ExecutorProcess:
    """An executor actor, and the link that stands for the scheduler."""

    def __init__(self, ticket: Ticket, load: Load) -> None:
        self._ticket = ticket
        self._load = load
        self._executor: Executor | None = None
        self._assigned: asyncio.Future[Assignment | None] | None = None

    async def run(self) -> int:
        """Serve until told to stop.  Returns the exit code."""
        ticket = self._ticket
        self._assigned = asyncio.get_running_loop().create_future()
        context = zmq.Context()
        link: SocketLink[ExecutorProcessInbox] = SocketLink(
            ticket.link, context, ExecutorProcessInbox, self._take, capacity=CAPACITY
        )
        try:
            link.connect(ticket.endpoint, ticket.keys)
            link.put(ExecutorAlive(ticket.rank))
            assignment = await self._assigned
            return 0 if assignment is None else await self._serve(assignment, link)
        finally:
            link.close(LAST_WORDS_S)
            context.term()

    def _take(self, message: ExecutorProcessInbox) -> None:
        assert self._assigned is not None
        match message:
            case Assignment():
                if not self._assigned.done():
                    self._assigned.set_result(message)
            case Step() | Stop():
                if self._executor is not None:
                    self._executor.inbox.put(message)
                elif isinstance(message, Stop) and not self._assigned.done():
                    self._assigned.set_result(None)
            case _:
                assert_never(message)

    async def _serve(self, assignment: Assignment, link: SocketLink[ExecutorProcessInbox]) -> int:
        rank = assignment.rank
        logging.basicConfig(
            level=assignment.log_level,
            format=f"%(asctime)s %(levelname)-7s executor{rank} %(name)s: %(message)s",
            stream=sys.stderr,
        )
        executor = Executor(rank=rank, capacity=assignment.capacity, load=partial(self._load, assignment))
        outgoing = Outgoing(link)
        executor.connect(outgoing)
        self._executor = executor
        running = asyncio.create_task(executor.run(), name=executor.name)
        heartbeat = asyncio.create_task(_beat(link, rank, assignment.heartbeat_s), name=f"{executor.name}.heartbeat")
        try:
            await asyncio.wait((running, outgoing.failed), return_when=asyncio.FIRST_COMPLETED)
            if outgoing.failed.done():
                raise outgoing.failed.result()
            await running
        except Exception as error:
            kind = type(error).__name__
            if kind not in SPOKEN:
                log.exception("executor%d fails", rank)
            link.put(ExecutorFailed(rank, kind, str(error)))
            return 1
        finally:
            heartbeat.cancel()
        return 0


class Outgoing:
    """Where the executor puts its results.  failed: why one could not be sent; without it nothing goes on."""

    def __init__(self, link: SocketLink[ExecutorProcessInbox]) -> None:
        self.failed: asyncio.Future[CallboardError] = asyncio.get_running_loop().create_future()
        self._link = link

    def put(self, message: ExecutorReady | StepDone) -> None:
        """Send."""
        try:
            self._link.put(message)
        except CallboardError as error:
            if not self.failed.done():
                self.failed.set_result(error)


async def _beat(link: SocketLink[ExecutorProcessInbox], rank: int, heartbeat_s: float) -> None:
    while True:
        await asyncio.sleep(heartbeat_s)
        with contextlib.suppress(LinkError):  # nobody listens just now: then nobody would miss it either
            link.put(ExecutorAlive(rank))


def load_rank(assignment: Assignment) -> Runner:
    """The runner of one rank; on the device thread.  Raises what the loading raises."""
    from engine.execution.loading import load_runner  # torch is needed from here on
    from engine.models.checkpoint import read_spec
    from engine.plugins.manager import Plugins

    config = assignment.config
    spec = read_spec(Path(config.model.path))
    plugins = Plugins(config.chosen_plugins(), (), config.plugins.options)
    runner = load_runner(
        config,
        spec,
        assignment.max_len,
        plugins,
        rank=assignment.rank,
        rendezvous=assignment.rendezvous,
        progress=assignment.progress,
    )
    return Shrinking(runner) if assignment.num_ranks == 1 else runner


if __name__ == "__main__":
    main(load_rank)
