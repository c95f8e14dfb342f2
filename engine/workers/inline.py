"""Executors in this process: each an actor on the shared event loop, with a device thread of its own.

Owns: their tasks.  Does not know: restarts, other placements.
A step that raises can be cured here if the device can: the executor is loaded anew in place.  A thread that hangs
cannot be ended from outside, and a CUDA context that has failed stays so for as long as its process: both
are clear failures of the engine.  Executors in processes of their own survive these too.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.actors.executor import Executor, Runner
from engine.actors.mailbox import Link
from engine.messages import ExecutorReady, Step, StepDone, Stop
from engine.workers.executors import RankLost, Reports, Terms, describe
from engine.workers.socket_directory import SocketDirectory

END_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class Report:
    """The link of an executor whose words go to the rank group."""

    reports: Reports
    rank: int

    def put(self, message: ExecutorReady | StepDone) -> None:
        """Pass it on under the rank's name."""
        self.reports.heard(self.rank, message)


class Meeting:
    """Where the ranks of one generation find each other, and what their library keeps there for as long as they are a
    group.  One rank needs none."""

    def __init__(self, num_ranks: int) -> None:
        self._directory = SocketDirectory() if num_ranks > 1 else None
        self.url = self._directory.rendezvous() if self._directory is not None else ""

    def end(self) -> None:
        """The group is no more."""
        if self._directory is not None:
            self._directory.remove()


class InlinePlacement:
    """load: (rank, terms, rendezvous) -> runner, called on the rank's device thread."""

    can_kill = False
    silence_timeout_s = 0.0
    join_timeout_s = 0.0

    def __init__(self, *, num_ranks: int, capacity: int, load: Callable[[int, Terms, str], Runner]) -> None:
        self._num_ranks = num_ranks
        self._capacity = capacity
        self._load = load

    def start(self, reports: Reports, terms: Terms) -> "InlineRanks":
        """Start a thread per rank."""
        executors = []
        meeting = Meeting(self._num_ranks)
        for rank in range(self._num_ranks):
            load = partial(self._load, rank, terms, meeting.url)
            executor = Executor(rank=rank, capacity=self._capacity, load=load)
            executor.connect(Report(reports, rank))
            executors.append(executor)
        return InlineRanks(executors, reports, meeting, reloaded=terms.num_pages > 0)


class InlineRanks:
    """One generation.  meeting: of its ranks.  reloaded: it is not the first."""

    def __init__(self, executors: Sequence[Executor], reports: Reports, meeting: Meeting, *, reloaded: bool) -> None:
        self.links: Sequence[Link[Step]] = [executor.inbox for executor in executors]
        self._executors = executors
        self._meeting = meeting
        self._reloaded = reloaded
        self._tasks = [
            asyncio.create_task(self._run(rank, executor, reports), name=executor.name)
            for rank, executor in enumerate(executors)
        ]

    async def _run(self, rank: int, executor: Executor, reports: Reports) -> None:
        try:
            await executor.run()
        except Exception as error:
            # If it cannot even be loaded again, the device is beyond what this process can do for it.
            curable = executor.loaded or not self._reloaded
            reports.lost(RankLost(describe(rank, error), error=error, curable=curable))

    async def end(self) -> None:
        """Ask every executor to end after the steps it has."""
        for executor in self._executors:
            executor.inbox.put(Stop())
        await asyncio.wait(self._tasks, timeout=END_TIMEOUT_S)

    async def kill(self, *, stuck: bool) -> None:
        """End the actors; a thread that is stuck is left behind."""
        for executor, task in zip(self._executors, self._tasks, strict=True):
            if not task.done():
                if stuck:
                    executor.abandon()
                task.cancel()
        await asyncio.wait(self._tasks)
        self._meeting.end()
