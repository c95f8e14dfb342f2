"""Executors of this process: actors on the shared event loop, each with a device thread of its own.

Owns: their start and their end.  Does not know: what a loss means, other placements.
A step that raises can be cured here if the device can: the executor is loaded anew in place.  A thread that hangs
cannot be ended from outside, and a CUDA context that has failed stays so for as long as its process: both are clear
failures of the engine.  Executors in processes of their own survive these too.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from engine.actors.executor import Executor
from engine.actors.runner import Runner
from engine.messages import ExecutorInbox, FromExecutor, Stop
from engine.workers.executors import GenerationSettings
from engine.workers.group import Start, WorkerSlot
from engine.workers.messages import WorkerReady
from engine.workers.socket_directory import Rendezvous
from engine.workers.worker import Reports, WorkerLost

INLINE_END_TIMEOUT_S = 4.0


class InlineExecutors:
    """load: (rank, settings, rendezvous) -> runner, called on the rank's device thread."""

    can_kill = False
    silence_s = 0.0
    join_s = 0.0

    def __init__(
        self, *, num_ranks: int, capacity: int, load: Callable[[int, GenerationSettings, str], Runner]
    ) -> None:
        self._num_ranks = num_ranks
        self._capacity = capacity
        self._load = load

    @contextmanager
    def generation(self, settings: GenerationSettings) -> Iterator[Start[FromExecutor, ExecutorInbox]]:
        rendezvous = Rendezvous(self._num_ranks)

        def start(slot: WorkerSlot[FromExecutor, ExecutorInbox], reports: Reports[FromExecutor]) -> InlineWorker:
            load = partial(self._load, slot.number, settings, rendezvous.url)
            executor = Executor(rank=slot.number, capacity=self._capacity, load=load)
            return InlineWorker(executor, reports, reloaded=settings.num_pages > 0)

        try:
            yield start
        finally:
            rendezvous.end()


class InlineWorker:
    """reloaded: it is not of the first generation."""

    def __init__(self, executor: Executor, reports: Reports[FromExecutor], *, reloaded: bool) -> None:
        self._executor = executor
        self._reports = reports
        self._reloaded = reloaded
        executor.connect(ready=lambda num_pages: reports.heard(WorkerReady(num_pages=num_pages)), done=reports.heard)
        self.put: Callable[[ExecutorInbox], None] = executor.inbox.put
        self._task = asyncio.create_task(self._run(), name=executor.name)

    async def end(self) -> None:
        """Ask it to end after the steps it has."""
        self._executor.inbox.put(Stop())
        await asyncio.wait((self._task,), timeout=INLINE_END_TIMEOUT_S)

    async def kill(self, *, is_stuck: bool) -> None:
        """End the actor; a thread that is stuck is left behind."""
        if not self._task.done():
            if is_stuck:
                self._executor.abandon()
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        try:
            await self._executor.run()
        except Exception as error:
            # If it cannot even be loaded again, the device is beyond what this process can do for it.
            curable = self._executor.loaded or not self._reloaded
            reason = f"{self._executor.name} crashed: {type(error).__name__}: {error}"
            self._reports.lost(WorkerLost(reason, error, curable=curable))
