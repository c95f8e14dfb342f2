"""The executors of one engine: all ranks of the model, which are lost, restarted and replaced together.

consumes: Step, FeatureRequest (scheduler, through ``links``) · LossExplained (scheduler) · Profile · Stop (system)
produces: ExecutorsReady, StepDone, FeatureAnswer, ExecutorsLost (scheduler)
waits for: the executors' loading and end; never for the scheduler.   owns: the reaction to a loss.

Requests live in the scheduler, so a lost generation costs time but no tokens.  The same holds for a generation that is
replaced, for example by one with another configuration, and for one that sleeps.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from engine.actors.actor import Actor, Link
from engine.actors.inboxes import ExecutorInbox, FromExecutor
from engine.messages import Step, StepDone, Stop
from engine.types.errors import CallboardError, EngineDied, StepTooLarge
from engine.types.notices import ExecutorsLost, ExecutorsReady, LossExplained, Profile
from engine.workers.group import Owner, Start, WorkerGroup, WorkerSlot, one_for_all
from engine.workers.limits import Patience, RestartIntensity
from engine.workers.messages import WorkerReady
from engine.workers.wire import WireError
from engine.workers.worker import WorkerLost

log = logging.getLogger(__name__)

ExecutorSlot = WorkerSlot[FromExecutor, ExecutorInbox]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Values for the next generation, found by earlier ones.

    num_pages: required pages of the KV pools; 0 for as many as fit.
    most_tokens: steps with more tokens are cut, since twice as many did not fit the device; 0 for no limit."""

    num_pages: int = 0
    most_tokens: int = 0


class ExecutorPlacement(Protocol):
    """The place where executors run.  can_kill, silence_s, join_s: as in ``WorkerGroup`` and ``Patience``."""

    can_kill: bool
    silence_s: float
    join_s: float

    def generation(self, settings: GenerationSettings) -> AbstractContextManager[Start[FromExecutor, ExecutorInbox]]:
        """Open what the ranks of one generation share; inside it each can be started.  Raises CallboardError."""
        ...


@dataclass(slots=True)
class RankLink:
    """The scheduler's link to one rank in any generation.  slot: of the ranks that work now."""

    slot: ExecutorSlot

    def put(self, message: ExecutorInbox) -> None:
        """Send, or drop if the rank is gone: the scheduler is notified next, and plans again."""
        if self.slot.is_ready:
            if isinstance(message, Step):  # a fetch has a timeout of its own
                self.slot.watch.sent()
            try:
                self.slot.put(message)
            except WireError as error:
                self.slot.lose(WorkerLost(f"{self.slot.name}: {error}"))


class _ExecutorGroup(Owner[FromExecutor, ExecutorInbox]):
    """The ranks of one placement, over all their generations.

    settings: from an earlier group, if it loads the same model.  is_active: it works for the scheduler."""

    def __init__(
        self,
        executors: "Executors",
        placement: ExecutorPlacement,
        step_timeout_s: float,
        settings: GenerationSettings | None = None,
    ) -> None:
        self.placement = placement
        self.step_timeout_s = step_timeout_s
        self.settings = settings or GenerationSettings()
        self.loaded = asyncio.Event()
        self.is_active = False
        self.workers = WorkerGroup[FromExecutor, ExecutorInbox](
            self,
            [f"executor{rank}" for rank in range(executors.num_ranks)],
            one_for_all,
            lambda: placement.generation(self.settings),
            intensity=executors.intensity,
            patience=Patience(silence_s=placement.silence_s, step_s=step_timeout_s, join_s=placement.join_s),
            can_kill=placement.can_kill,
        )
        self._executors = executors
        self._is_quiet = asyncio.Event()
        self._lost_at = 0.0

    def take(self, slot: ExecutorSlot, message: FromExecutor) -> None:
        """Pass a rank's finished step or fetched pages to the scheduler."""
        if message.rank != slot.number:
            log.warning("%s: refused: a result of rank %d", slot.name, message.rank)
            return
        if isinstance(message, StepDone):
            slot.watch.answered()
        if self.is_active:
            self._executors.send(message)
        else:
            self._settle()

    def on_ready(self, slots: Sequence[ExecutorSlot], ready: Sequence[WorkerReady]) -> None:
        """Report that every rank has loaded."""
        num_pages, took_s = min(one.num_pages for one in ready), 0.0
        if not self.settings.num_pages:
            self.settings = replace(self.settings, num_pages=num_pages)
        elif self._lost_at:
            took_s = asyncio.get_running_loop().time() - self._lost_at
            log.info("executors are back after %.2f s", took_s)
        self._executors.put_to_work(self, num_pages, took_s)
        self.loaded.set()

    def on_lost(self, slots: Sequence[ExecutorSlot], loss: WorkerLost) -> None:
        """Report a loss, so that the scheduler does not plan for ranks that are gone."""
        self._lost_at = asyncio.get_running_loop().time()
        if self.is_active:
            self._executors.send(ExecutorsLost(reason=str(loss)))
        self._settle()

    async def quiet(self) -> None:
        """Wait until no step is running; none may be in transit to the ranks."""
        self._is_quiet.clear()
        self._settle()
        await self._is_quiet.wait()

    def _settle(self) -> None:
        if not any(slot.is_ready and slot.watch.is_waiting for slot in self.workers.slots):
            self._is_quiet.set()

    def judge(self, losses: Sequence[WorkerLost]) -> bool:
        """Whether a loss counts as a restart, as in ``Owner``.

        The report of a step too large for one rank may arrive after those of the ranks that waited for it."""
        loss = next((one for one in losses if isinstance(one.error, StepTooLarge)), losses[0])
        explained = self._executors.take_explained()
        if loss.error is not None:
            if not isinstance(loss.error, CallboardError):
                log.error("%s", loss, exc_info=loss.error)
            _drop_traceback(loss.error)
        if not loss.curable:
            if isinstance(loss.error, EngineDied):
                raise loss.error
            raise EngineDied(f"{loss}; this process cannot repair it, with placement.executor = 'process' it restarts")
        if isinstance(loss.error, StepTooLarge):
            # Not a fault yet, and not a loop: the limit from now on is half of the size that failed.
            self._executors.send(ExecutorsLost(reason=str(loss), is_fault=False))
            self.settings = replace(self.settings, most_tokens=loss.error.num_tokens // 2)
            log.warning("%s; steps are cut to %d tokens from now on", loss, self.settings.most_tokens)
            return False
        if explained is None:
            return True
        self.workers.intensity.forgive(explained.num_losses - 1)
        return not explained.executors_work


TakingOver = Callable[[int], None]
"""Called with the number of pages when new executors have loaded, before they get work.  An exception refuses them."""


class Executors(Actor[Stop]):
    """The actor that starts, restarts and replaces the executors.

    num_ranks: tensor-parallel size.  step_timeout_s: a rank whose step takes longer hangs.
    links: the scheduler's, one per rank.  last_recovery_s: from the last loss until executors were ready again.
    are_out: an operator has stopped the executors, and requests wait."""

    def __init__(
        self, *, num_ranks: int, placement: ExecutorPlacement, intensity: RestartIntensity, step_timeout_s: float
    ) -> None:
        super().__init__("executors", capacity=4)
        self.num_ranks = num_ranks
        self.intensity = intensity
        self.last_recovery_s = 0.0
        self.are_out = False
        self._present = _ExecutorGroup(self, placement, step_timeout_s)
        self._next: tuple[_ExecutorGroup, TakingOver] | None = None
        self.links = [RankLink(slot) for slot in self._present.workers.slots]
        self._running: dict[_ExecutorGroup, asyncio.Task[None]] = {}
        self._over: asyncio.Future[None] | None = None
        self._explained: LossExplained | None = None  # the explanation of the next loss to judge
        self._restarts_before = 0  # restarts of earlier groups

    def connect(self, scheduler: Link[ExecutorsReady | FromExecutor | ExecutorsLost]) -> None:
        """Set the receiver of results, the scheduler; it needs this actor's links, so it is built later."""
        self._scheduler = scheduler

    @property
    def num_restarts(self) -> int:
        """Restarts of all executors together."""
        return self._restarts_before + self._group.num_restarts

    @property
    def _group(self) -> WorkerGroup[FromExecutor, ExecutorInbox]:
        return self._present.workers

    def explain(self, loss: LossExplained) -> None:
        """Store the explanation at once: the scheduler is notified of a loss, and answers, before it is judged."""
        self._explained = loss

    def profile(self, ask: Profile) -> None:
        """Send a profile command to every rank; missing ones are left out."""
        for link in self.links:
            link.put(ask)

    async def run(self) -> None:
        """Keep a generation running until Stop.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        self._over = asyncio.get_running_loop().create_future()
        self._present.is_active = True  # an error of its first load is raised here
        self._start(self._present)
        self.inbox.open(lambda messages: self._stop())
        try:
            await self._over
        finally:
            self.inbox.close()
            for task in self._running.values():
                task.cancel()
            while self._running:
                await asyncio.wait(list(self._running.values()))
                await asyncio.sleep(0)  # let the tasks' done callbacks run
            self.close()

    # ---- replacement ------------------------------------------------------------

    async def replace(
        self, placement: ExecutorPlacement, step_timeout_s: float, taking_over: TakingOver, *, beside: bool
    ) -> None:
        """Replace the present executors by those of another placement; steps in flight are dropped.

        beside: the present ones work until the new ones have loaded.  If not, they end first, requests wait, and they
        are loaded again if the new ones fail.  Raises what loading or ``taking_over`` raised."""
        group = _ExecutorGroup(self, placement, step_timeout_s)
        if not beside:
            await self.release("the executors are being replaced")
        self._next = group, taking_over
        try:
            await self._load(group)
        except CallboardError:
            self._next = None
            if not beside:
                await self._load_again()
            raise
        finally:
            self._next = None

    async def release(self, reason: str, *, is_sleep: bool = False, keep: bool = False) -> None:
        """Take the executors out of work; requests keep their state and wait.  Returns when no step is running.

        keep: the executors stay loaded; otherwise they end.  is_sleep: as in ``ExecutorsLost``."""
        group = self._present
        self.are_out, group.is_active = True, False
        self.send(ExecutorsLost(reason=reason, is_fault=False, is_sleep=is_sleep))
        if keep:
            await group.quiet()
        else:
            await self._end(group)

    async def resume(self) -> None:
        """Put executors back to work after ``release``.  Raises what loading raised; they stay out then."""
        group = self._present
        self.are_out = False
        if group in self._running:
            group.is_active = True
            if all(
                slot.is_ready for slot in group.workers.slots
            ):  # else it was lost meanwhile, and reports when it is back
                self.put_to_work(group, group.settings.num_pages)
            return
        self._adopt(_ExecutorGroup(self, group.placement, group.step_timeout_s, group.settings))
        try:
            await self._load(self._present)
        except CallboardError:
            self.are_out = True
            raise

    async def _load_again(self) -> None:
        try:
            await self.resume()
        except CallboardError as error:
            if self._over is not None and not self._over.done():
                self._over.set_exception(EngineDied(f"the previous executors cannot be loaded again: {error}"))

    def put_to_work(self, group: _ExecutorGroup, num_pages: int, took_s: float = 0.0) -> None:
        """Put a loaded generation to work: one of the present group, or of the group that replaces it now.

        took_s: since the loss that it recovers from, 0 for none."""
        self.last_recovery_s = took_s or self.last_recovery_s
        if self._next is not None and group is self._next[0]:
            self._next[1](num_pages)
            if not self.are_out:
                # Results of the old ones are dropped; the scheduler's next step is for the new ones.
                self._present.is_active = False
                self.send(ExecutorsLost(reason="the executors are being replaced", is_fault=False))
                self._present.workers.stop()
            self._adopt(group)
            self.are_out = False
        if not self.are_out:
            group.is_active = True
            self.send(ExecutorsReady(num_pages=num_pages))

    def _adopt(self, group: _ExecutorGroup) -> None:
        self._restarts_before += self._group.num_restarts
        self._present = group
        for link, slot in zip(self.links, group.workers.slots, strict=True):
            link.slot = slot

    def send(self, message: ExecutorsReady | FromExecutor | ExecutorsLost) -> None:
        """Send to the scheduler."""
        self._scheduler.put(message)

    def take_explained(self) -> LossExplained | None:
        """Return the scheduler's explanation of the loss that is judged now, and forget it."""
        explained, self._explained = self._explained, None
        return explained

    # ---- groups as tasks ---------------------------------------------------------------------

    def _start(self, group: _ExecutorGroup) -> asyncio.Task[None]:
        task = self._running[group] = asyncio.create_task(group.workers.run(), name="executors.group")
        task.add_done_callback(lambda done: self._has_ended(group, done))
        return task

    async def _load(self, group: _ExecutorGroup) -> None:
        """Start a group and wait until it has loaded.  Raises what loading raised."""
        running, loaded = self._start(group), asyncio.create_task(group.loaded.wait())
        await asyncio.wait((running, loaded), return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if not group.loaded.is_set():
            if not running.cancelled():
                running.result()
            raise EngineDied("the engine was stopped while executors loaded")

    async def _end(self, group: _ExecutorGroup) -> None:
        group.workers.stop()
        if (task := self._running.get(group)) is not None:
            await asyncio.wait((task,))

    def _has_ended(self, group: _ExecutorGroup, task: asyncio.Task[None]) -> None:
        del self._running[group]
        error = None if task.cancelled() else task.exception()
        assert self._over is not None
        if not self._over.done() and group is self._present and group.is_active:
            self._over.set_exception(error) if error is not None else self._over.set_result(None)

    def _stop(self) -> None:
        if self._present in self._running:
            self._present.is_active = True
            self._present.workers.stop()
        elif self._over is not None and not self._over.done():
            self._over.set_result(None)


def _drop_traceback(error: BaseException) -> None:
    """Drop the tracebacks, whose frames hold the weights and the pool of a generation that is gone."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
