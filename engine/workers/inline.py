"""Executors in this process: actors on the shared event loop, each with a device thread of its own.

Owns: their start and their end.  Does not know: the reaction to a loss, other placements.
If the device works, a step that raises is repaired here by loading the executor again in place.  A hung thread cannot
be ended from outside, and a failed CUDA context stays failed until its process ends: both fail the engine.
Executors in processes of their own survive these too.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from engine.actors.executor import Executor
from engine.actors.inboxes import ExecutorInbox, FromExecutor
from engine.actors.runner import Runner
from engine.messages import Stop
from engine.workers.executors import GenerationSettings
from engine.workers.group import Start, WorkerSlot
from engine.workers.messages import WorkerReady
from engine.workers.socket_directory import Rendezvous
from engine.workers.worker import Reports, WorkerLost

INLINE_END_TIMEOUT_S = 4.0


class InlineExecutors:
    """Executors as actors of this process.

    load: (rank, settings, rendezvous) -> runner, called on the rank's device thread."""

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
    """One executor of a generation.  reloaded: it is not of the first generation."""

    def __init__(self, executor: Executor, reports: Reports[FromExecutor], *, reloaded: bool) -> None:
        self._executor = executor
        self._reports = reports
        self._reloaded = reloaded
        executor.connect(
            ready=lambda num_pages: reports.received(WorkerReady(num_pages=num_pages)), done=reports.received
        )
        self.put: Callable[[ExecutorInbox], None] = executor.inbox.put
        self._task = asyncio.create_task(self._run(), name=executor.name)

    async def end(self) -> None:
        """Ask it to end after its queued steps."""
        self._executor.inbox.put(Stop())
        await asyncio.wait((self._task,), timeout=INLINE_END_TIMEOUT_S)

    async def kill(self, *, is_stuck: bool) -> None:
        """End the actor; a thread that hangs is left running."""
        if not self._task.done():
            if is_stuck:
                self._executor.abandon()
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        try:
            await self._executor.run()
        except Exception as error:
            # If it cannot even be loaded again, the device cannot be repaired within this process.
            curable = self._executor.loaded or not self._reloaded
            reason = f"{self._executor.name} crashed: {type(error).__name__}: {error}"
            self._reports.lost(WorkerLost(reason, error, curable=curable))
