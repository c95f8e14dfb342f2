"""The rank group: every executor of one engine, started together, watched together, restarted together.

consumes: Step (scheduler, through ``links``) · Stop (system)
produces: ExecutorReady, StepDone, ExecutorsLost (scheduler)
waits for: the executors' loading and their end; never for the scheduler.   owns: the ranks' lives.

Executors come in generations.  When one rank dies, hangs, or reports a fault, the whole generation ends: whatever it
still says is dropped, the scheduler is told once, and the next generation loads.  Requests live in the scheduler, so
a lost generation costs time and no token.  A restart that helps no more is not repeated for ever: see ``intensity``.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.actors.actor import Actor
from engine.actors.mailbox import Link
from engine.errors import CallboardError, EngineDied, StepTooLarge
from engine.messages import ExecutorAlive, ExecutorReady, ExecutorsLost, LossExplained, Step, StepDone, Stop
from engine.workers.intensity import RestartIntensity
from engine.workers.watch import TICKS, Watch

log = logging.getLogger(__name__)

LOAD_FACTOR = 5.0  # a reload may take so many times as long as the first load did
LOAD_SECONDS = 60.0  # and this much more
LOAD_PATIENCE = 6  # while it loads, a rank that has spoken may be silent for so many times as long


class RankLost(CallboardError):
    """A rank is gone, and with it its generation.  What it says names the rank.

    error: what it raised, if it got to say so.  curable: another generation may do better."""

    def __init__(self, reason: str, *, error: Exception | None = None, curable: bool = True) -> None:
        super().__init__(reason)
        self.error = error
        self.curable = curable


@dataclass(frozen=True, slots=True)
class Terms:
    """What a generation has to go by, learnt from those before it.

    num_pages: how many its KV pools must have; 0 for what fits.
    most_tokens: steps with more are cut, since the device had no room for one of twice as many; 0 for no limit."""

    num_pages: int = 0
    most_tokens: int = 0


class Reports(Protocol):
    """Where a placement tells what its ranks do; all calls on the event loop."""

    def heard(self, rank: int, message: ExecutorReady | StepDone | ExecutorAlive) -> None:
        """A rank has said something."""
        ...

    def lost(self, loss: RankLost) -> None:
        """A rank is gone.  Only a generation's first loss counts."""
        ...


class Ranks(Protocol):
    """One generation of executors.  links: one per rank."""

    links: Sequence[Link[Step]]

    async def end(self) -> None:
        """Let every rank finish the steps it has, and end; returns when all have ended, or have had their time."""
        ...

    async def kill(self, *, stuck: bool) -> None:
        """End what still runs, at once; returns when nothing is left that could be ended.  Also after ``end``.

        stuck: a rank hangs in a step; do not wait for it where it cannot be ended."""
        ...


class Placement(Protocol):
    """Where executors run.

    can_kill: whether a rank that hangs can be ended.  silence_timeout_s: a rank that has loaded and says nothing for
    that long is gone; 0 where a rank need not say anything by itself.  join_timeout_s: how long ranks may take to come
    before they load, which the placement watches itself; 0 where they are started."""

    can_kill: bool
    silence_timeout_s: float
    join_timeout_s: float

    def start(self, reports: Reports, terms: Terms) -> Ranks:
        """Start a generation.  Raises CallboardError."""
        ...


@dataclass(frozen=True, slots=True)
class RankLink:
    """The scheduler's link to one rank, whichever generation it is."""

    group: "RankGroup"
    rank: int

    def put(self, message: Step) -> None:
        """Send, or drop if the rank is gone: the scheduler hears of that next, and plans anew."""
        self.group.send(self.rank, message)


@dataclass(frozen=True, slots=True)
class LossLink:
    """The scheduler's link to the group itself."""

    group: "RankGroup"

    def put(self, message: LossExplained) -> None:
        """Takes effect at once: the scheduler hears of a loss, and answers, before the group gets to judge it."""
        self.group.explained = message


class RankGroup(Actor[Stop]):
    """num_ranks: tensor-parallel size.  step_timeout_s: a step that takes longer means that its rank hangs."""

    def __init__(
        self, *, num_ranks: int, placement: Placement, intensity: RestartIntensity, step_timeout_s: float
    ) -> None:
        super().__init__("executors", capacity=4)
        self.links = [RankLink(self, rank) for rank in range(num_ranks)]
        self.losses = LossLink(self)
        self.explained: LossExplained | None = None  # the loss that is to be judged next
        self.num_restarts = 0
        self.last_recovery_s = 0.0
        self._placement = placement
        self._intensity = intensity
        self._step_timeout_s = step_timeout_s
        self._scheduler: Link[ExecutorReady | StepDone | ExecutorsLost] | None = None
        self._generation: _Generation | None = None
        self._terms = Terms()
        self._load_s = math.inf
        self._lost_at = 0.0
        self._told_to_stop: asyncio.Event = asyncio.Event()

    def connect(self, scheduler: Link[ExecutorReady | StepDone | ExecutorsLost]) -> None:
        """Where results go; known only after the scheduler, which needs this actor's links, is built."""
        self._scheduler = scheduler

    def send(self, rank: int, step: Step) -> None:
        """A step for a rank of the generation that is ready; there may be none."""
        if self._generation is not None:
            self._generation.send(rank, step)

    async def run(self) -> None:
        """Keep a generation running until Stop.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        assert self._scheduler is not None, f"{self.name} ran before it was connected"
        self.inbox.open(lambda messages: self._told_to_stop.set())
        try:
            while True:
                generation = await self._live(self._scheduler)
                if self._told_to_stop.is_set():
                    return
                self._judge(generation.cause or generation.loss.result())
        finally:
            self.inbox.close()
            self.close()

    async def _live(self, scheduler: Link[ExecutorReady | StepDone | ExecutorsLost]) -> "_Generation":
        """One generation, from its start to its end: it has a loss unless the group was told to stop."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        generation = _Generation(
            scheduler,
            len(self.links),
            self._ticks(self._step_timeout_s),
            self._ticks(self._placement.silence_timeout_s),
        )
        timer = asyncio.create_task(self._keep_time(generation), name=f"{self.name}.watch")
        stopping = asyncio.create_task(self._told_to_stop.wait(), name=f"{self.name}.stop")
        ranks: Ranks | None = None
        try:
            ranks = self._placement.start(generation, self._terms)
            generation.links = ranks.links
            self._generation = generation
            await asyncio.wait((generation.ready, generation.loss, stopping), return_when=asyncio.FIRST_COMPLETED)
            if generation.ready.done():
                self._note_ready(generation, loop.time() - started_at)
                await asyncio.wait((generation.loss, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not self._told_to_stop.is_set():
                self._lost_at = loop.time()
            elif generation.ready.done() and not generation.loss.done():  # who loads has nothing to finish
                await ranks.end()
        finally:
            generation.close()
            self._generation = None
            timer.cancel()
            stopping.cancel()
            if ranks is not None:
                await ranks.kill(stuck=generation.is_stuck)
        return generation

    def _note_ready(self, generation: "_Generation", load_s: float) -> None:
        if not self._terms.num_pages:
            self._terms = replace(self._terms, num_pages=min(generation.ready.result()))
            self._load_s = load_s
            return
        self.last_recovery_s = asyncio.get_running_loop().time() - self._lost_at
        log.info("executors are back after %.2f s", self.last_recovery_s)

    def _judge(self, loss: RankLost) -> None:
        """Return if there may be another generation."""
        if not self._terms.num_pages:
            # It never ran: what is wrong is the configuration, the checkpoint, the machine, and not a moment's fault.
            raise loss.error if loss.error is not None else EngineDied(f"{loss} while it started")
        reason = str(loss)
        explained, self.explained = self.explained, None
        if loss.error is not None:
            if not isinstance(loss.error, CallboardError):
                log.error("%s", reason, exc_info=loss.error)
            _drop_traceback(loss.error)
        if not loss.curable:
            if isinstance(loss.error, EngineDied):
                raise loss.error
            raise EngineDied(
                f"{reason}; that cannot be cured in this process, placement.executor = 'process' can do it"
            )
        if isinstance(loss.error, StepTooLarge):
            # No fault yet, and no loop either: what is allowed from now on is half of what has failed.
            if self._scheduler is not None:
                self._scheduler.put(ExecutorsLost(reason, is_fault=False))
            self.num_restarts += 1
            self._terms = replace(self._terms, most_tokens=loss.error.num_tokens // 2)
            log.warning("%s; executors start again with steps cut to %d tokens", reason, self._terms.most_tokens)
            return
        if explained is not None:
            self._intensity.forgive(explained.num_losses - 1)
        if explained is None or not explained.executors_work:
            self._intensity.spend(reason, asyncio.get_running_loop().time())
        self.num_restarts += 1
        log.warning("%s; every executor is restarted (%d so far), requests wait", reason, self.num_restarts)

    def _tick_s(self) -> float:
        timeouts = [one for one in (self._step_timeout_s, self._placement.silence_timeout_s) if one > 0]
        return min(timeouts, default=TICKS) / TICKS

    def _ticks(self, timeout_s: float) -> int:
        return math.ceil(timeout_s / self._tick_s())

    async def _keep_time(self, generation: "_Generation") -> None:
        tick_s = self._tick_s()
        load_timeout_s = LOAD_FACTOR * self._load_s + LOAD_SECONDS + self._placement.join_timeout_s
        loading_s = 0.0
        while True:
            await asyncio.sleep(tick_s)
            if generation.ready.done():
                generation.tick(curable=self._placement.can_kill)
            else:
                loading_s += tick_s
                generation.tick_loading()
                if loading_s > load_timeout_s:
                    generation.lost(RankLost(f"the executors have not loaded within {load_timeout_s:.0f} s"))


class _Generation:
    """What one generation has said.  ready: every rank's number of pages.  loss: why it is over.

    cause: a step that was too large for one rank, which may be heard only after those whom that rank left waiting."""

    def __init__(
        self,
        scheduler: Link[ExecutorReady | StepDone | ExecutorsLost],
        num_ranks: int,
        step_ticks: int,
        silence_ticks: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[list[int]] = loop.create_future()
        self.loss: asyncio.Future[RankLost] = loop.create_future()
        self.links: Sequence[Link[Step]] = ()
        self.cause: RankLost | None = None
        self.is_stuck = False
        self._scheduler = scheduler
        self._watches = [Watch(step_ticks, silence_ticks) for _ in range(num_ranks)]
        self._loading = [Watch(0, LOAD_PATIENCE * silence_ticks) for _ in range(num_ranks)]
        self._there: set[int] = set()
        self._pages: dict[int, int] = {}
        self._is_open = True

    def send(self, rank: int, step: Step) -> None:
        if not self._is_open or not self.ready.done():
            return
        self._watches[rank].sent()
        try:
            self.links[rank].put(step)
        except CallboardError as error:
            self.lost(RankLost(f"executor{rank}: {error}"))

    def heard(self, rank: int, message: ExecutorReady | StepDone | ExecutorAlive) -> None:
        if not self._is_open:
            return
        match message:
            case StepDone():
                self._watches[rank].answered()
                self._scheduler.put(message)
            case ExecutorAlive():
                self._there.add(rank)
                self._watches[rank].heard()
                self._loading[rank].heard()
            case ExecutorReady():
                self._pages[rank] = message.num_pages
                self._watches[rank].heard()
                if len(self._pages) == len(self._watches):
                    self.ready.set_result(list(self._pages.values()))
                self._scheduler.put(message)

    def lost(self, loss: RankLost) -> None:
        if isinstance(loss.error, StepTooLarge):
            self.cause = loss
        if self._is_open:
            self.close()
            self.loss.set_result(loss)
            # Now, not when the group gets its turn: the scheduler must not plan for ranks that are gone.
            self._scheduler.put(ExecutorsLost(str(loss)))

    def tick(self, *, curable: bool) -> None:
        for rank, watch in enumerate(self._watches):
            if (failing := watch.tick()) is not None:
                self.is_stuck = True
                self.lost(RankLost(f"executor{rank} {failing}", curable=curable))

    def tick_loading(self) -> None:
        """As ``tick``: a rank on another machine may vanish without anybody hearing of it."""
        for rank in sorted(self._there - self._pages.keys()):
            if (failing := self._loading[rank].tick()) is not None:
                self.lost(RankLost(f"executor{rank} {failing}"))

    def close(self) -> None:
        """Pass nothing on any more."""
        self._is_open = False


def describe(rank: int, error: Exception) -> str:
    """What to say of a rank that raised."""
    return f"executor{rank} crashed: {type(error).__name__}: {error}"


def _drop_traceback(error: BaseException) -> None:
    """Its frames hold the weights and the pool of a generation that is gone."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
