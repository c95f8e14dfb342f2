"""A group of workers of any kind: started, watched, ended, and restarted within limits.

Owns: the lives of workers, which of them live and die together, how long they have been quiet, how often they restart.
Does not know: how a worker is started, what it does, what is lost with it; the owner knows these.
Workers live in generations.  When one dies, hangs, fails or accepts nothing, its generation ends: its later messages
are dropped, the owner is called once, and the next generation loads.  The policy decides which slots belong together:
``one_for_all`` puts all of them into one generation, ``one_for_one`` each into its own.
Time is counted in ticks of a timer, not read from a clock: when this process itself stands still (a sleeping laptop, a
busy machine) one tick passes, however long that takes, so no worker is blamed.  And a step does not read a clock.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol

from engine.types.errors import CallboardError, EngineDied
from engine.workers.limits import Patience, RestartIntensity
from engine.workers.messages import WorkerAlive, WorkerReady
from engine.workers.wire import WireError
from engine.workers.worker import Inbound, Outbound, Reports, Worker, WorkerLost

log = logging.getLogger(__name__)

TICKS = 8  # ticks per timeout
GRACE_S = 0.2  # longer than the report of a worker's end takes
LAST_WORDS_S = 0.05  # a worker's last messages may arrive just after its end is seen
LOAD_FACTOR = 5.0  # a reload may take this many times the first load's time
LOAD_SECONDS = 60.0  # plus this many seconds
LOAD_PATIENCE = 6  # a loading worker may be silent for this many times the timeout


class Watch:
    """Whether a worker answers steps, and sends anything at all.

    step_ticks, silence_ticks: ticks that it may take; 0 for no limit."""

    def __init__(self, step_ticks: int, silence_ticks: int) -> None:
        self._step_ticks = step_ticks
        self._silence_ticks = silence_ticks
        self._num_out = 0
        self._step_quiet = 0
        self._quiet = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a step is unanswered."""
        return self._num_out > 0

    def sent(self) -> None:
        """Count a step that is sent to the worker."""
        if not self._num_out:
            self._step_quiet = 0
        self._num_out += 1

    def answered(self) -> None:
        """Count a finished step; the time of the next one, if any, starts now."""
        self._num_out -= 1
        self._step_quiet = 0

    def received(self) -> None:
        """Note any message of the worker."""
        self._quiet = 0

    def tick(self, patience: int = 1) -> str | None:
        """Count a tick.  Returns the worker's failure if a limit is exceeded, else None.

        patience: factor on the limit of silence."""
        self._quiet += 1
        self._step_quiet += 1
        if self._num_out and 0 < self._step_ticks < self._step_quiet:
            return "does not finish its step"
        if 0 < patience * self._silence_ticks < self._quiet:
            return "has stopped answering"
        return None


class Owner(Protocol[Inbound, Outbound]):
    """The actor that gives the workers their work.  An exception of its methods ends the group."""

    def take(self, slot: "WorkerSlot[Inbound, Outbound]", message: Inbound) -> None:
        """Handle a message of a worker."""
        ...

    def on_ready(self, slots: "Sequence[WorkerSlot[Inbound, Outbound]]", ready: Sequence[WorkerReady]) -> None:
        """Handle a generation that has loaded and accepts work.  ready: the reports of its workers."""
        ...

    def on_lost(self, slots: "Sequence[WorkerSlot[Inbound, Outbound]]", loss: WorkerLost) -> None:
        """Handle the loss of a generation."""
        ...

    def judge(self, losses: Sequence[WorkerLost]) -> bool:
        """Whether a generation's end counts against the limit of restarts.  Raises EngineDied if restarts cannot help.

        losses: all losses that were reported until the generation was gone, the one that ended it first."""
        return True


class WorkerSlot(Generic[Inbound, Outbound]):
    """A slot of a group, filled by one worker after the other.

    name: of the worker in it.  waiting, peak: of its mailbox, as last reported."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.waiting = 0
        self.peak = 0
        self.life: WorkerRun[Inbound, Outbound] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a worker that accepts work."""
        return self.life is not None and self.life.takes_work

    @property
    def watch(self) -> Watch:
        """The watch of the present worker."""
        return self._current.watch

    @property
    def _current(self) -> "WorkerRun[Inbound, Outbound]":
        assert self.life is not None, f"{self.name} has no worker"
        return self.life

    def put(self, message: Outbound) -> None:
        """Send to the worker, which must be ready; one that accepts nothing is treated as lost.  Raises WireError."""
        life = self._current
        assert life.takes_work, f"{self.name} is not ready for {type(message).__name__}"
        assert life.worker is not None
        try:
            life.worker.put(message)
        except WireError:
            raise
        except CallboardError as error:
            # It gets no more messages but is not lost yet: its end is reported in a moment, with a better reason.
            life.takes_work = False
            asyncio.get_running_loop().call_later(GRACE_S, life.lost, WorkerLost(f"{self.name}: {error}"))

    def lose(self, loss: WorkerLost) -> None:
        """Declare its worker lost."""
        self._current.lost(loss)


class WorkerRun(Generic[Inbound, Outbound]):
    """One worker in a slot, from its start until its generation is over.  ready: its report when it had loaded."""

    def __init__(
        self, generation: "_Generation[Inbound, Outbound]", slot: WorkerSlot[Inbound, Outbound], watch: Watch
    ) -> None:
        self.slot = slot
        self.watch = watch
        self.worker: Worker[Outbound] | None = None
        self.ready: WorkerReady | None = None
        self.has_spoken = self.takes_work = False
        self._generation = generation
        slot.life = self
        slot.waiting = 0

    def received(self, message: Inbound | WorkerReady | WorkerAlive) -> None:
        self._generation.received(self, message)

    def lost(self, loss: WorkerLost) -> None:
        self._generation.lost(loss)


class _Generation(Generic[Inbound, Outbound]):
    """Workers that live and die together.  losses: the reasons of its end, in order.  over: set with the first one."""

    def __init__(self, group: "WorkerGroup[Inbound, Outbound]", slots: Sequence[WorkerSlot[Inbound, Outbound]]) -> None:
        loop = asyncio.get_running_loop()
        self.slots = slots
        self.started_at = loop.time()
        self.losses: list[WorkerLost] = []
        self.over: asyncio.Future[None] = loop.create_future()
        self.is_open = True
        self.is_ready = self.is_stuck = False
        self.lives = [WorkerRun(self, slot, group.new_watch()) for slot in slots]
        self._group = group

    def received(self, life: WorkerRun[Inbound, Outbound], message: Inbound | WorkerReady | WorkerAlive) -> None:
        """Handle a message of a worker."""
        if not self.is_open:
            return
        life.watch.received()
        life.has_spoken = True
        match message:
            case WorkerAlive(waiting=waiting, peak=peak):
                life.slot.waiting, life.slot.peak = waiting, peak
            case WorkerReady():
                life.ready = message
                ready = [one.ready for one in self.lives if one.ready is not None]
                if len(ready) == len(self.lives) and not self.is_ready:
                    self.is_ready = True
                    for one in self.lives:
                        one.takes_work = True
                    self._group.loaded(self, ready)
            case _:
                self._group.call_owner(lambda owner: owner.take(life.slot, message))

    def lost(self, loss: WorkerLost) -> None:
        """Handle the loss of a worker.  Later losses, until all workers are gone, may hold the cause."""
        self.losses.append(loss)
        if self.is_open:
            self.close()
            self.over.set_result(None)
            # At once, not when the group's task runs: nothing more may be given to these workers.
            self._group.call_owner(lambda owner: owner.on_lost(self.slots, loss))

    def close(self) -> None:
        """Drop later messages, and accept no more work."""
        self.is_open = False
        for life in self.lives:
            life.takes_work = False

    def tick(self, *, can_kill: bool) -> None:
        """Count a tick for workers that have loaded."""
        for life in self.lives:
            if (failing := life.watch.tick()) is not None:
                self.is_stuck = True
                self.lost(WorkerLost(f"{life.slot.name} {failing}", curable=can_kill))

    def tick_loading(self) -> None:
        """Count a tick while they load: a worker on another machine may vanish without another sign."""
        for life in self.lives:
            if life.has_spoken and life.ready is None and (failing := life.watch.tick(LOAD_PATIENCE)) is not None:
                self.lost(WorkerLost(f"{life.slot.name} {failing}"))


Start = Callable[[WorkerSlot[Inbound, Outbound], Reports[Inbound]], Worker[Outbound]]
"""Starts a worker for a slot.  Raises CallboardError on failure."""

Generation = Callable[[], AbstractContextManager[Start[Inbound, Outbound]]]
"""Opens what the workers of a generation share, for its lifetime.  Raises CallboardError on failure."""

Policy = Callable[[Sequence[WorkerSlot[Inbound, Outbound]]], Sequence[Sequence[WorkerSlot[Inbound, Outbound]]]]
"""Groups the slots whose workers share a generation."""


def one_for_all(slots: Sequence[WorkerSlot[Inbound, Outbound]]) -> Sequence[Sequence[WorkerSlot[Inbound, Outbound]]]:
    """Group all slots: a loss ends and restarts all of them."""
    return [slots]


def one_for_one(slots: Sequence[WorkerSlot[Inbound, Outbound]]) -> Sequence[Sequence[WorkerSlot[Inbound, Outbound]]]:
    """Group each slot alone: a loss ends and restarts nothing else."""
    return [[slot] for slot in slots]


class WorkerGroup(Generic[Inbound, Outbound]):
    """Keeps a worker in every slot.

    names: of the slots.  can_kill: whether a worker that hangs can be killed.
    has_started: every slot has had a ready worker, all at the same time."""

    def __init__(
        self,
        owner: Owner[Inbound, Outbound],
        names: Sequence[str],
        policy: Policy[Inbound, Outbound],
        generation: Generation[Inbound, Outbound],
        *,
        intensity: RestartIntensity,
        patience: Patience,
        can_kill: bool = True,
    ) -> None:
        self.slots = [WorkerSlot[Inbound, Outbound](name, number) for number, name in enumerate(names)]
        self.intensity = intensity
        self.num_restarts = 0
        self.has_started = False
        self._owner = owner
        self._policy = policy
        self._new_generation = generation
        self._patience = patience
        self._can_kill = can_kill
        self._tick_s = min((one for one in (patience.step_s, patience.silence_s) if one > 0), default=TICKS) / TICKS
        self._load_s = 0.0
        self._stop_requested = asyncio.Event()
        self._is_given_up = False
        self._failure: Exception | None = None

    @property
    def num_ready(self) -> int:
        """Workers that accept work."""
        return sum(slot.is_ready for slot in self.slots)

    def stop(self) -> None:
        """Let workers finish their work and end; ``run`` returns then."""
        self._stop_requested.set()

    async def run(self) -> None:
        """Keep a worker in every slot until ``stop`` is called.

        Raises what the first load raised, what the owner raises, or EngineDied when restarting does not help."""
        tasks = [
            asyncio.create_task(self._keep(slots), name=f"{slots[0].name}.keep") for slots in self._policy(self.slots)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._give_up()
            await asyncio.wait(tasks)
        if self._failure is not None:
            raise self._failure
        for task in tasks:
            task.result()

    def new_watch(self) -> Watch:
        """Return the watch of a new worker."""
        step_s, silence_s = self._patience.step_s, self._patience.silence_s
        return Watch(math.ceil(step_s / self._tick_s), math.ceil(silence_s / self._tick_s))

    def call_owner(self, what: Callable[[Owner[Inbound, Outbound]], None]) -> None:
        """Call the owner.  As with a message in an actor's mailbox, an exception is fatal."""
        try:
            what(self._owner)
        except Exception as error:
            self._failure = self._failure or error
            self._give_up()

    def _give_up(self) -> None:
        """Kill all workers.  No task is cancelled: it may be in the middle of killing its workers."""
        self._is_given_up = True
        self._stop_requested.set()

    def loaded(self, generation: _Generation[Inbound, Outbound], ready: Sequence[WorkerReady]) -> None:
        """Report a loaded generation to the owner."""
        load_s = asyncio.get_running_loop().time() - generation.started_at
        if not self.has_started:
            self._load_s = max(self._load_s, load_s)
            self.has_started = all(slot.is_ready for slot in self.slots)
        log.info("%s ready after %.2f s", ", ".join(slot.name for slot in generation.slots), load_s)
        self.call_owner(lambda owner: owner.on_ready(generation.slots, ready))

    async def _keep(self, slots: Sequence[WorkerSlot[Inbound, Outbound]]) -> None:
        """Run one generation after the other."""
        while losses := await self._live(slots):
            loss = losses[0]
            if not self.has_started:
                # It never ran: the configuration, the checkpoint or the machine is wrong, so a restart cannot help.
                raise loss.error if loss.error is not None else EngineDied(f"{loss} while it started")
            if self._owner.judge(losses):
                self.intensity.spend(str(loss), asyncio.get_running_loop().time())
            self.num_restarts += 1
            subject = "it is" if len(slots) == 1 else f"all {len(slots)} are"
            log.warning("%s; %s restarted (%d so far)", loss, subject, self.num_restarts)

    async def _live(self, slots: Sequence[WorkerSlot[Inbound, Outbound]]) -> list[WorkerLost]:
        """Run one generation from start to end.  Returns why it was lost; an empty list if the group was stopped."""
        generation = _Generation(self, slots)
        timer = asyncio.create_task(self._keep_time(generation), name=f"{slots[0].name}.watch")
        stopping = asyncio.create_task(self._stop_requested.wait(), name=f"{slots[0].name}.stop")
        workers: list[Worker[Outbound]] = []
        try:
            with self._new_generation() as start:
                try:
                    for life in generation.lives:
                        life.worker = start(life.slot, life)
                        workers.append(life.worker)
                    await asyncio.wait((generation.over, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if generation.losses and len(workers) > 1:
                        # One worker's failure may be caused by another, whose reason is the true one.
                        await asyncio.sleep(LAST_WORDS_S)
                    elif generation.is_ready and not generation.losses and not self._is_given_up:
                        await asyncio.gather(*(worker.end() for worker in workers))
                finally:
                    generation.close()
                    await asyncio.gather(*(worker.kill(is_stuck=generation.is_stuck) for worker in workers))
        finally:
            timer.cancel()
            stopping.cancel()
        return [] if self._stop_requested.is_set() else generation.losses

    async def _keep_time(self, generation: _Generation[Inbound, Outbound]) -> None:
        """Detect workers that do not join, load or answer in time, or send nothing for too long."""
        patience = self._patience
        reload_s = LOAD_FACTOR * self._load_s + LOAD_SECONDS + patience.join_s
        load_timeout_s = reload_s if self.has_started else patience.first_load_s
        loading_s = 0.0
        while generation.is_open:
            await asyncio.sleep(self._tick_s)
            if generation.is_ready:
                generation.tick(can_kill=self._can_kill)
                continue
            loading_s += self._tick_s
            generation.tick_loading()
            loading = [life.slot.name for life in generation.lives if life.ready is None]
            missing = [life.slot.name for life in generation.lives if not life.has_spoken]
            if missing and 0 < patience.join_s < loading_s:
                error = EngineDied(f"{', '.join(missing)} did not join within {patience.join_s:g} s")
                # They had the configured time; another generation would only wait as long again.
                generation.lost(WorkerLost(str(error), error, curable=False))
            elif 0 < load_timeout_s < loading_s:
                generation.lost(WorkerLost(f"{', '.join(loading)} did not load within {load_timeout_s:.0f} s"))
