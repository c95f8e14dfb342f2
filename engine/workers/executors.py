"""The executors of one engine: every rank of the model, lost and restarted together; and those in this process.

consumes: Step, FetchPages (scheduler, through ``links``) · LossExplained (scheduler) · Profile · Stop (system)
produces: ExecutorsReady, StepDone, PagesFetched, ExecutorsLost (scheduler)
waits for: the executors' loading and their end; never for the scheduler.   owns: what a loss means.

Requests live in the scheduler, so a lost generation costs time and no token.

An inline executor is an actor on the shared event loop, with a device thread of its own.  A step that raises can be
cured there if the device can: the executor is loaded anew in place.  A thread that hangs cannot be ended from outside,
and a CUDA context that has failed stays so for as long as its process: both are clear failures of the engine.
Executors in processes of their own survive these too.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from engine.actors.actor import Actor, Link
from engine.actors.executor import Executor, Runner
from engine.errors import CallboardError, EngineDied, StepTooLarge
from engine.messages import ExecutorInbox, FromExecutor, Profile, Step, StepDone, Stop
from engine.notices import ExecutorsLost, ExecutorsReady, LossExplained
from engine.workers.group import Owner, Start, WorkerGroup, WorkerSlot, one_for_all
from engine.workers.limits import Patience, RestartIntensity
from engine.workers.messages import WorkerReady
from engine.workers.socket_directory import Rendezvous
from engine.workers.wire import WireError
from engine.workers.worker import Reports, WorkerLost

log = logging.getLogger(__name__)

INLINE_END_TIMEOUT_S = 4.0
ExecutorSlot = WorkerSlot[FromExecutor, ExecutorInbox]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What a generation has to go by, learnt from those before it.

    num_pages: how many its KV pools must have; 0 for what fits.
    most_tokens: steps with more are cut, since the device had no room for one of twice as many; 0 for no limit."""

    num_pages: int = 0
    most_tokens: int = 0


class ExecutorPlacement(Protocol):
    """Where executors run.  can_kill, silence_s, join_s: as in ``WorkerGroup`` and ``Patience``."""

    can_kill: bool
    silence_s: float
    join_s: float

    def generation(self, settings: GenerationSettings) -> AbstractContextManager[Start[FromExecutor, ExecutorInbox]]:
        """What the ranks of one generation share; within, each of them can be started.  Raises CallboardError."""
        ...


@dataclass(frozen=True, slots=True)
class RankLink:
    """The scheduler's link to one rank, whichever generation it is of."""

    slot: ExecutorSlot

    def put(self, message: ExecutorInbox) -> None:
        """Send, or drop if the rank is gone: the scheduler hears of that next, and plans anew."""
        if self.slot.is_ready:
            if isinstance(message, Step):  # a fetch is answered by a limit of its own
                self.slot.watch.sent()
            try:
                self.slot.put(message)
            except WireError as error:
                self.slot.lose(WorkerLost(f"{self.slot.name}: {error}"))


class Executors(Actor[Stop], Owner[FromExecutor, ExecutorInbox]):
    """num_ranks: tensor-parallel size.  step_timeout_s: a step that takes longer means that its rank hangs.

    links: the scheduler's, one per rank.  last_recovery_s: from the last loss until executors were ready again."""

    def __init__(
        self, *, num_ranks: int, placement: ExecutorPlacement, intensity: RestartIntensity, step_timeout_s: float
    ) -> None:
        super().__init__("executors", capacity=4)
        self._group = WorkerGroup[FromExecutor, ExecutorInbox](
            self,
            [f"executor{rank}" for rank in range(num_ranks)],
            one_for_all,
            lambda: placement.generation(self._settings),
            intensity=intensity,
            patience=Patience(silence_s=placement.silence_s, step_s=step_timeout_s, join_s=placement.join_s),
            can_kill=placement.can_kill,
        )
        self.links = [RankLink(slot) for slot in self._group.slots]
        self.last_recovery_s = 0.0
        self._settings = GenerationSettings()
        self._explained: LossExplained | None = None  # the loss that is to be judged next
        self._lost_at = 0.0

    def connect(self, scheduler: Link[ExecutorsReady | FromExecutor | ExecutorsLost]) -> None:
        """Where results go; known only after the scheduler, which needs this actor's links, is built."""
        self._scheduler = scheduler

    @property
    def num_restarts(self) -> int:
        """Of all executors together."""
        return self._group.num_restarts

    def explain(self, loss: LossExplained) -> None:
        """Take effect at once: the scheduler hears of a loss, and answers, before it is judged here."""
        self._explained = loss

    def profile(self, ask: Profile) -> None:
        """Have every rank do it; one that is not there now is left out."""
        for link in self.links:
            link.put(ask)

    async def run(self) -> None:
        """Keep a generation running until Stop.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        self.inbox.open(lambda messages: self._group.stop())
        try:
            await self._group.run()
        finally:
            self.inbox.close()
            self.close()

    def take(self, slot: ExecutorSlot, message: FromExecutor) -> None:
        """A rank has done a step, or has fetched pages."""
        if message.rank != slot.number:
            log.warning("%s: refused: a result of rank %d", slot.name, message.rank)
            return
        if isinstance(message, StepDone):
            slot.watch.answered()
        self._scheduler.put(message)

    def came(self, slots: Sequence[ExecutorSlot], ready: Sequence[WorkerReady]) -> None:
        """Every rank has loaded."""
        num_pages = min(one.num_pages for one in ready)
        if not self._settings.num_pages:
            self._settings = replace(self._settings, num_pages=num_pages)
        else:
            self.last_recovery_s = asyncio.get_running_loop().time() - self._lost_at
            log.info("executors are back after %.2f s", self.last_recovery_s)
        self._scheduler.put(ExecutorsReady(num_pages))

    def went(self, slots: Sequence[ExecutorSlot], loss: WorkerLost) -> None:
        """The scheduler must not plan for ranks that are gone."""
        self._lost_at = asyncio.get_running_loop().time()
        self._scheduler.put(ExecutorsLost(str(loss)))

    def judge(self, losses: Sequence[WorkerLost]) -> bool:
        """See ``Owner``.  A step too large for one rank may be heard of only after the ranks that it left waiting."""
        loss = next((one for one in losses if isinstance(one.error, StepTooLarge)), losses[0])
        explained, self._explained = self._explained, None
        if loss.error is not None:
            if not isinstance(loss.error, CallboardError):
                log.error("%s", loss, exc_info=loss.error)
            _drop_traceback(loss.error)
        if not loss.curable:
            if isinstance(loss.error, EngineDied):
                raise loss.error
            raise EngineDied(f"{loss}; that cannot be cured in this process, placement.executor = 'process' can do it")
        if isinstance(loss.error, StepTooLarge):
            # No fault yet, and no loop either: what is allowed from now on is half of what has failed.
            self._scheduler.put(ExecutorsLost(str(loss), is_fault=False))
            self._settings = replace(self._settings, most_tokens=loss.error.num_tokens // 2)
            log.warning("%s; steps are cut to %d tokens from now on", loss, self._settings.most_tokens)
            return False
        if explained is None:
            return True
        self._group.intensity.forgive(explained.num_losses - 1)
        return not explained.executors_work


def _drop_traceback(error: BaseException) -> None:
    """Its frames hold the weights and the pool of a generation that is gone."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


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
        """See ``ExecutorPlacement``."""
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
        executor.connect(ready=lambda num_pages: reports.heard(WorkerReady(num_pages)), done=reports.heard)
        self._task = asyncio.create_task(self._run(), name=executor.name)

    def put(self, message: ExecutorInbox) -> None:
        """Send."""
        self._executor.inbox.put(message)

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
