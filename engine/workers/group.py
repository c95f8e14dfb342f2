"""A group of workers: started, watched, ended, and started anew within limits; written once for every kind of worker.

Owns: the lives of workers, which of them live and die together, how long they have been quiet, how often they restart.
Does not know: how a worker is started, what it does, what is lost with it: that is its owner's to say.
Workers come in generations.  When one dies, hangs, fails or takes nothing any more, the generation that it belongs to
ends: nothing that it still says is heard, the owner is told once, and the next generation loads.  Which slots belong
together is the policy: ``one_for_all`` puts all of them into one generation, ``one_for_one`` each into its own.
Time is counted in ticks of a timer, not read from a clock: when this process itself stood still (a laptop asleep, a
busy machine) one tick passes, however long that took, so no worker is blamed.  And a step costs no look at a clock.
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
from engine.workers.worker import Reports, Said, Told, Worker, WorkerLost

log = logging.getLogger(__name__)

TICKS = 8  # so many make a timeout
GRACE_S = 0.2  # longer than it takes to hear of a worker's end
LAST_WORDS_S = 0.05  # what a worker said before it ended may arrive just after its end is seen
LOAD_FACTOR = 5.0  # a reload may take so many times as long as the first load did
LOAD_SECONDS = 60.0  # and this much more
LOAD_PATIENCE = 6  # while it loads, a worker that has spoken may be silent for so many times as long


class Watch:
    """Whether a worker answers, and says anything.  step_ticks, silence_ticks: how many it may be quiet for; 0 for any
    number."""

    def __init__(self, step_ticks: int, silence_ticks: int) -> None:
        self._step_ticks = step_ticks
        self._silence_ticks = silence_ticks
        self._num_out = 0
        self._step_quiet = 0
        self._quiet = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a step is not done."""
        return self._num_out > 0

    def sent(self) -> None:
        """A step is on its way to the worker."""
        if not self._num_out:
            self._step_quiet = 0
        self._num_out += 1

    def answered(self) -> None:
        """A step is done: the next one starts now, if there is one."""
        self._num_out -= 1
        self._step_quiet = 0

    def heard(self) -> None:
        """The worker is there."""
        self._quiet = 0

    def tick(self, patience: int = 1) -> str | None:
        """Time has passed.  Returns what the worker fails to do, once it has taken too long.

        patience: with its silence, so many times as much."""
        self._quiet += 1
        self._step_quiet += 1
        if self._num_out and 0 < self._step_ticks < self._step_quiet:
            return "does not finish its step"
        if 0 < patience * self._silence_ticks < self._quiet:
            return "has stopped answering"
        return None


class Owner(Protocol[Said, Told]):
    """The actor that gives the workers their work.  What its methods raise ends the group."""

    def take(self, slot: "WorkerSlot[Said, Told]", message: Said) -> None:
        """A worker says something."""
        ...

    def came(self, slots: "Sequence[WorkerSlot[Said, Told]]", ready: Sequence[WorkerReady]) -> None:
        """A generation has loaded, and takes work.  ready: what its workers said of it."""
        ...

    def went(self, slots: "Sequence[WorkerSlot[Said, Told]]", loss: WorkerLost) -> None:
        """A generation is gone."""
        ...

    def judge(self, losses: Sequence[WorkerLost]) -> bool:
        """Whether a generation's end counts against the limit of restarts.  Raises EngineDied if none will help.

        losses: all that was heard of until nothing was left of it, the one that ended it first."""
        return True


class WorkerSlot(Generic[Said, Told]):
    """A place in a group, which workers hold one after the other.

    name: of whichever worker has it.  waiting, peak: of that one's mailbox, as it last said."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.waiting = 0
        self.peak = 0
        self.life: _Life[Said, Told] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a worker, and it takes work."""
        return self.life is not None and self.life.takes_work

    @property
    def watch(self) -> Watch:
        """Of its worker."""
        return self._current.watch

    @property
    def _current(self) -> "_Life[Said, Told]":
        assert self.life is not None, f"{self.name} has no worker"
        return self.life

    def put(self, message: Told) -> None:
        """Send to the worker, which must be ready; one that takes nothing is as good as lost.  Raises WireError."""
        life = self._current
        assert life.takes_work, f"{self.name} is not ready for {type(message).__name__}"
        assert life.worker is not None
        try:
            life.worker.put(message)
        except WireError:
            raise
        except CallboardError as error:
            # It gets no more, and is not lost yet: what has become of it is known in a moment, and says more.
            life.takes_work = False
            asyncio.get_running_loop().call_later(GRACE_S, life.lost, WorkerLost(f"{self.name}: {error}"))

    def lose(self, loss: WorkerLost) -> None:
        """Give its worker up."""
        self._current.lost(loss)


class _Life(Generic[Said, Told]):
    """One worker in a slot, from its start until its generation is over.  ready: what it said when it had loaded."""

    def __init__(self, generation: "_Generation[Said, Told]", slot: WorkerSlot[Said, Told], watch: Watch) -> None:
        self.slot = slot
        self.watch = watch
        self.worker: Worker[Told] | None = None
        self.ready: WorkerReady | None = None
        self.has_spoken = self.takes_work = False
        self._generation = generation
        slot.life = self
        slot.waiting = 0

    def heard(self, message: Said | WorkerReady | WorkerAlive) -> None:
        self._generation.heard(self, message)

    def lost(self, loss: WorkerLost) -> None:
        self._generation.lost(loss)


class _Generation(Generic[Said, Told]):
    """Workers that live and die together.  losses: why it is over, the first one first.  over: set with that one."""

    def __init__(self, group: "WorkerGroup[Said, Told]", slots: Sequence[WorkerSlot[Said, Told]]) -> None:
        loop = asyncio.get_running_loop()
        self.slots = slots
        self.started_at = loop.time()
        self.losses: list[WorkerLost] = []
        self.over: asyncio.Future[None] = loop.create_future()
        self.is_open = True
        self.is_ready = self.is_stuck = False
        self.lives = [_Life(self, slot, group.new_watch()) for slot in slots]
        self._group = group

    def heard(self, life: _Life[Said, Told], message: Said | WorkerReady | WorkerAlive) -> None:
        """A worker has said something."""
        if not self.is_open:
            return
        life.watch.heard()
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
                self._group.tell(lambda owner: owner.take(life.slot, message))

    def lost(self, loss: WorkerLost) -> None:
        """A worker is gone.  What is known later, until nothing is left of the others, may say why."""
        self.losses.append(loss)
        if self.is_open:
            self.close()
            self.over.set_result(None)
            # Now, not when the group's task gets its turn: nothing more may be given to these workers.
            self._group.tell(lambda owner: owner.went(self.slots, loss))

    def close(self) -> None:
        """Hear nothing any more, and take nothing."""
        self.is_open = False
        for life in self.lives:
            life.takes_work = False

    def tick(self, *, can_kill: bool) -> None:
        """Time has passed for workers that have loaded."""
        for life in self.lives:
            if (failing := life.watch.tick()) is not None:
                self.is_stuck = True
                self.lost(WorkerLost(f"{life.slot.name} {failing}", curable=can_kill))

    def tick_loading(self) -> None:
        """The same while they load: one on another machine may vanish, and nothing else tells of it."""
        for life in self.lives:
            if life.has_spoken and life.ready is None and (failing := life.watch.tick(LOAD_PATIENCE)) is not None:
                self.lost(WorkerLost(f"{life.slot.name} {failing}"))


Start = Callable[[WorkerSlot[Said, Told], Reports[Said]], Worker[Told]]
"""Starts a worker for a slot.  Raises CallboardError if that cannot be."""

Generation = Callable[[], AbstractContextManager[Start[Said, Told]]]
"""Makes what the workers of a generation share, for as long as it lives.  Raises CallboardError if that cannot be."""

Policy = Callable[[Sequence[WorkerSlot[Said, Told]]], Sequence[Sequence[WorkerSlot[Said, Told]]]]
"""Which slots have their generations together."""


def one_for_all(slots: Sequence[WorkerSlot[Said, Told]]) -> Sequence[Sequence[WorkerSlot[Said, Told]]]:
    """A loss ends and restarts all of them."""
    return [slots]


def one_for_one(slots: Sequence[WorkerSlot[Said, Told]]) -> Sequence[Sequence[WorkerSlot[Said, Told]]]:
    """A loss ends and restarts nothing else."""
    return [[slot] for slot in slots]


class WorkerGroup(Generic[Said, Told]):
    """names: of the slots.  can_kill: whether a worker that hangs can be ended.

    has_started: every slot has had a worker that was ready, all at one time."""

    def __init__(
        self,
        owner: Owner[Said, Told],
        names: Sequence[str],
        policy: Policy[Said, Told],
        generation: Generation[Said, Told],
        *,
        intensity: RestartIntensity,
        patience: Patience,
        can_kill: bool = True,
    ) -> None:
        self.slots = [WorkerSlot[Said, Told](name, number) for number, name in enumerate(names)]
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
        self._told_to_stop = asyncio.Event()
        self._is_given_up = False
        self._failure: Exception | None = None

    @property
    def num_ready(self) -> int:
        """Workers that take work."""
        return sum(slot.is_ready for slot in self.slots)

    def stop(self) -> None:
        """Let workers finish what they have, and end; ``run`` returns then."""
        self._told_to_stop.set()

    async def run(self) -> None:
        """Keep a worker in every slot until told to stop.

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
        """For a new worker."""
        step_s, silence_s = self._patience.step_s, self._patience.silence_s
        return Watch(math.ceil(step_s / self._tick_s), math.ceil(silence_s / self._tick_s))

    def tell(self, what: Callable[[Owner[Said, Told]], None]) -> None:
        """Call the owner.  As with a message in an actor's mailbox, what goes wrong there is the end."""
        try:
            what(self._owner)
        except Exception as error:
            self._failure = self._failure or error
            self._give_up()

    def _give_up(self) -> None:
        """Kill what is there.  No task is cancelled for it: it may be in the middle of killing its workers."""
        self._is_given_up = True
        self._told_to_stop.set()

    def loaded(self, generation: _Generation[Said, Told], ready: Sequence[WorkerReady]) -> None:
        """A generation takes work from now on."""
        load_s = asyncio.get_running_loop().time() - generation.started_at
        if not self.has_started:
            self._load_s = max(self._load_s, load_s)
            self.has_started = all(slot.is_ready for slot in self.slots)
        log.info("%s ready after %.2f s", ", ".join(slot.name for slot in generation.slots), load_s)
        self.tell(lambda owner: owner.came(generation.slots, ready))

    async def _keep(self, slots: Sequence[WorkerSlot[Said, Told]]) -> None:
        """One generation after the other."""
        while losses := await self._live(slots):
            loss = losses[0]
            if not self.has_started:
                # It never ran: what is wrong is the configuration, the checkpoint, the machine, and no moment's fault.
                raise loss.error if loss.error is not None else EngineDied(f"{loss} while it started")
            if self._owner.judge(losses):
                self.intensity.spend(str(loss), asyncio.get_running_loop().time())
            self.num_restarts += 1
            who = "it is" if len(slots) == 1 else f"all {len(slots)} are"
            log.warning("%s; %s restarted (%d so far)", loss, who, self.num_restarts)

    async def _live(self, slots: Sequence[WorkerSlot[Said, Told]]) -> list[WorkerLost]:
        """One generation, from its start to its end.  Returns why it was lost; nothing if told to stop."""
        generation = _Generation(self, slots)
        timer = asyncio.create_task(self._keep_time(generation), name=f"{slots[0].name}.watch")
        stopping = asyncio.create_task(self._told_to_stop.wait(), name=f"{slots[0].name}.stop")
        workers: list[Worker[Told]] = []
        try:
            with self._new_generation() as start:
                try:
                    for life in generation.lives:
                        life.worker = start(life.slot, life)
                        workers.append(life.worker)
                    await asyncio.wait((generation.over, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if generation.losses and len(workers) > 1:
                        # One's failure may be that of another, whose reason is the true one.
                        await asyncio.sleep(LAST_WORDS_S)
                    elif generation.is_ready and not generation.losses and not self._is_given_up:
                        await asyncio.gather(*(worker.end() for worker in workers))
                finally:
                    generation.close()
                    await asyncio.gather(*(worker.kill(is_stuck=generation.is_stuck) for worker in workers))
        finally:
            timer.cancel()
            stopping.cancel()
        return [] if self._told_to_stop.is_set() else generation.losses

    async def _keep_time(self, generation: _Generation[Said, Told]) -> None:
        """Notice workers that do not come, do not load, do not answer, or say nothing for too long."""
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
                # They have had as long as was asked for; another generation would only wait as long again.
                generation.lost(WorkerLost(str(error), error, curable=False))
            elif 0 < load_timeout_s < loading_s:
                generation.lost(WorkerLost(f"{', '.join(loading)} did not load within {load_timeout_s:.0f} s"))
