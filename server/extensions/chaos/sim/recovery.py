"""Groups of simulated workers under each of the three owners: killed, hung, late, deaf, also while they load or end.

Owns: the scenario of a seed, how it is carried out, what must hold of workers whatever they do.
Does not know: what must hold of the work (``traffic.py``).  ``WorkerGroup`` and its owners are the engine's own;
workers, their links and those around the owner are simulated, on a virtual clock.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.messages import Stop
from engine.types.errors import CallboardError, EngineDied
from engine.types.notices import Message
from engine.workers.group import LOAD_PATIENCE, TICKS, WorkerSlot
from engine.workers.limits import RestartIntensity
from engine.workers.messages import WorkerAlive, WorkerReady
from engine.workers.worker import Reports, WorkerLost
from server.extensions.chaos.sim.failures import SimCrash, SimFailure, SimIncorrect, SimStuck
from server.extensions.chaos.sim.loop import SimLoop
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.traffic import KINDS, SimTraffic

SILENCE_S = 1.0
LOAD_S = 2.0
END_TIMEOUT_S = 4.0
WINDOW_S = 1e6
LIVENESS_S = 600.0
MOST_LOAD_S = 130.0  # whatever a group allows
SEEN_S = 0.01  # from a worker's end until it is noticed


@dataclass(frozen=True, slots=True)
class Fault:
    """An event that befalls the worker of a slot.

    kind: kill, hang, deaf (it takes nothing), late (the next one there loads for ``seconds``), stop (of the group)."""

    at: float
    kind: str
    slot: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.  faults: each under the number that it has in the full list, in order of time."""

    seed: int
    kind: str
    num_workers: int
    max_restarts: int
    faults: dict[int, Fault]

    def only(self, kept: list[int]) -> "Plan":
        """The same without all other faults."""
        faults = {number: self.faults[number] for number in kept}
        return Plan(self.seed, self.kind, self.num_workers, self.max_restarts, faults)


def draw(seed: int) -> Plan:
    """The run of a seed."""
    rng = random.Random(seed * 2 + 1)
    kind = rng.choice(tuple(KINDS))
    num_workers = 1 if kind == "frontend" else rng.choice((1, 2, 3))
    faults, at = [], 3 * LOAD_S if rng.random() < 0.95 else 0.5
    for _ in range(rng.randint(1, 7)):
        # Often in the middle of what the one before has set going.
        at += rng.choice((0.0, 0.02, 0.2, 1.0, LOAD_S, 10.0)) * rng.uniform(0.5, 1.5)
        what = rng.choice(("kill", "kill", "hang", "deaf", "late"))
        faults.append(Fault(at, what, rng.randrange(num_workers), rng.choice((5.0, 20.0, 200.0))))
    if rng.random() < 0.5:
        at += rng.choice((0.0, 0.02, 1.0, 30.0))
        faults.append(Fault(at, "stop"))
        if rng.random() < 0.6:
            faults.append(Fault(at + rng.choice((0.0, 0.01, 0.05)), rng.choice(("kill", "hang")), 0))
    return Plan(seed, kind, num_workers, rng.choice((1, 3, 100, 100)), dict(enumerate(faults)))


class SimWorker:
    """One worker.  It reports that it is there, loads, and does the work of its kind.

    is_healthy: nothing has befallen it."""

    def __init__(self, world: "WorkerWorld", slot: WorkerSlot[Any, Any], reports: Reports[Any], about: Any) -> None:
        self.slot = slot
        self.world = world
        self.about = about
        self.life = len(world.workers)
        self.is_healthy = True
        self.is_silent = self.is_deaf = self.is_gone = self.is_ready = False
        self.is_told_to_end = False
        self.num_said = 0
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._to: deque[tuple[float, Message]] = deque()
        self._said: deque[tuple[float, Message]] = deque()
        self._last_due = {"to": 0.0, "from": 0.0}
        self._over = asyncio.Event()
        self.load_s = world.late.pop(slot.number, LOAD_S * (0.5 + self.luck(1) / 2))
        self._beat()
        self._loop.call_later(self.load_s, self._loaded)

    def luck(self, *key: int) -> float:
        """Return this worker's chance, by key."""
        return luck(self.world.plan.seed, self.slot.number, self.life, *key)

    def send(self, message: Message, after_s: float = 0.0) -> None:
        """Send to the group, after the time of the work and of the link."""
        self._loop.call_later(after_s, self._send, message)

    def put(self, message: Message) -> None:
        """Take a message of the group."""
        if self.is_deaf:
            raise CallboardError("it takes nothing")
        self._way("to", lambda: self._take(message))

    async def end(self) -> None:
        """End in order, as ``Worker`` does."""
        self.is_told_to_end = True
        self._way("to", lambda: self._take(Stop()))
        try:
            await asyncio.wait_for(self._over.wait(), END_TIMEOUT_S)
        except TimeoutError:
            if self.is_healthy:
                self.world.fail(SimStuck(f"{self.slot.name} does not end"))

    async def kill(self, *, is_stuck: bool) -> None:
        """End at once, as ``Worker`` does."""
        await asyncio.sleep(0.1 * self.luck(2))
        self.world.killed(self)
        self.is_gone = True

    def strike(self, kind: str) -> None:
        """Let something happen to it."""
        self.is_healthy = False
        if kind == "deaf":
            self.is_deaf = True
            return
        self.is_silent = True
        if kind == "kill":
            self.is_deaf = True
            self._over.set()
            self._loop.call_later(SEEN_S, self._reports.lost, WorkerLost(f"{self.slot.name} was killed"))

    def _send(self, message: Message) -> None:
        if not self.is_silent:
            self.num_said += 1
            self._way("from", lambda: self._reports.received(message))

    def _way(self, way: str, arrive: Callable[[], None]) -> None:
        """Deliver in order, each message after a delay of its own."""
        self.num_said += 1
        due = max(self._last_due[way], self._loop.time() + 0.02 * self.luck(3, self.num_said))
        self._last_due[way] = due
        self._loop.call_at(due, arrive)

    def _beat(self) -> None:
        if not self.is_gone and not self._over.is_set():
            self.send(WorkerAlive())
            # While it loads, it may be busy for longer than its silence is borne with later.
            self._loop.call_later(SILENCE_S / 4 if self.is_ready else 3 * SILENCE_S * self.luck(4), self._beat)

    def _loaded(self) -> None:
        if not self.is_silent and not self.is_gone:
            if self.load_s > MOST_LOAD_S:
                self.world.fail(SimStuck(f"{self.slot.name} loads for {self.load_s:g} s and is waited for"))
            self.is_ready = True
            self._beat()
            self.send(WorkerReady(num_pages=7))
            self.world.traffic.began(self)

    def _take(self, message: Message) -> None:
        if self.is_silent or self.is_gone or self._over.is_set():
            return
        if isinstance(message, Stop):
            self._loop.call_later(0.05, self._over.set)
            return
        if not self.is_ready:
            self.world.fail(SimIncorrect(f"{self.slot.name} has not loaded and gets {type(message).__name__}"))
        self.world.traffic.work(self, message)


class WorkerWorld:
    """One run.  marks: what has happened in it.  failure: what must not have."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.marks: Counter[str] = Counter()
        self.failure: SimFailure | None = None
        self.workers: list[SimWorker] = []
        self.late: dict[int, float] = {}
        self.is_stopped = self.stopped_ready = False
        self.loop = SimLoop(lambda function, arguments: 0.001)
        intensity = RestartIntensity(plan.max_restarts, WINDOW_S)
        self.traffic: SimTraffic = KINDS[plan.kind](self, plan.num_workers, intensity, SILENCE_S)

    def fail(self, failure: BaseException) -> None:
        """The first one counts."""
        if self.failure is None:
            crash = SimCrash(f"{type(failure).__name__}: {failure}")
            self.failure = failure if isinstance(failure, SimFailure) else crash

    def run(self) -> None:
        """Carry out the plan.  Never raises what the engine did wrong."""
        self.loop.set_exception_handler(
            lambda _, context: self.fail(context.get("exception") or SimCrash(context["message"]))
        )
        self.loop.play(self._play(), self.fail)

    # ---- what the group does ----------------------------------------------------------------

    def start(self, slot: WorkerSlot[Any, Any], reports: Reports[Any], about: Any = None) -> SimWorker:
        """A new worker."""
        together = [one for one in self.workers if self.traffic.is_one_for_all or one.slot is slot]
        newest = [one for one in together if one.slot is slot]
        if any(not one.is_gone for one in newest):
            self.fail(SimIncorrect(f"{slot.name}: a second worker starts while the first one is there"))
        if slot.number == 0 and any(not one.is_gone for one in together):
            self.fail(SimIncorrect("a generation starts while one of the last is there"))
        if self.is_stopped:
            self.fail(SimIncorrect(f"{slot.name} is started anew while the engine ends"))
        self.workers.append(SimWorker(self, slot, reports, about))
        return self.workers[-1]

    def killed(self, worker: SimWorker) -> None:
        """A worker is gone.  It, or one that it lives and dies with, must have given a reason."""
        together = self.living if self.traffic.is_one_for_all else [worker]
        is_late = any(one.load_s > MOST_LOAD_S and not one.is_ready for one in together)
        if is_late or self.traffic.is_dying or not all(one.is_healthy for one in together):
            return
        if not self.is_stopped:
            self.fail(SimIncorrect(f"{worker.slot.name} is killed and nothing is wrong with it"))
        elif self.stopped_ready and not worker.is_told_to_end:
            self.fail(SimIncorrect(f"{worker.slot.name} is killed and was not let to end"))

    @property
    def living(self) -> list[SimWorker]:
        """The newest worker of each slot."""
        return list({one.slot.number: one for one in self.workers}.values())

    # ---- the run ----------------------------------------------------------------------------

    async def _play(self) -> None:
        running = asyncio.ensure_future(self.traffic.run())
        for fault in self.plan.faults.values():
            await asyncio.sleep(max(0.0, fault.at - self.loop.time()))
            if running.done():
                break
            self._apply(fault)
        if not self.is_stopped and not running.done():
            await self._wait_for(lambda: running.done() or self.traffic.is_quiet, "all to come to rest")
            if not running.done():
                self._stop()
        await self._wait_for(running.done, "the owner to end")
        self._check_end(running)

    def _apply(self, fault: Fault) -> None:
        if fault.kind == "stop":
            self._stop()
            return
        if fault.kind == "late":
            self.late[fault.slot] = fault.seconds
            self.marks["late readiness" if fault.seconds < 60 else "too late"] += 1
            return
        worker = next((one for one in self.living if one.slot.number == fault.slot), None)
        if worker is None or worker.is_gone or not worker.is_healthy:
            return
        if not worker.is_ready and self.traffic.has_started:
            self.marks[f"{fault.kind} during recovery"] += 1
        if self.is_stopped:
            self.marks[f"{fault.kind} while draining"] += 1
        self.marks[fault.kind] += 1
        worker.strike(fault.kind)
        life = worker.slot.life
        if fault.kind == "hang" and life is not None and (worker.slot.is_ready or (life.has_spoken and not life.ready)):
            limit_s = SILENCE_S * (1 + 4 / TICKS) * (1 if worker.slot.is_ready else LOAD_PATIENCE) + 0.5
            self.loop.call_later(limit_s, self._check_noticed, worker, limit_s)

    def _check_noticed(self, worker: SimWorker, limit_s: float) -> None:
        if not worker.is_gone and not self.is_stopped and not self.traffic.is_dying:
            self.fail(SimStuck(f"{worker.slot.name} hangs, and its group has not noticed within {limit_s:.1f} s"))

    def _stop(self) -> None:
        self.stopped_ready = self.traffic.is_ready
        if self.stopped_ready and self.traffic.is_dying:
            self.fail(SimIncorrect(f"{self.traffic.num_losses} losses, {self.plan.max_restarts} were allowed"))
        self.is_stopped = True
        self.traffic.stop()

    async def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        until = self.loop.time() + LIVENESS_S
        while not done():
            if self.failure is not None:
                raise self.failure
            if self.loop.time() > until:
                raise SimStuck(f"waited {LIVENESS_S:g} s for {what}")
            await asyncio.sleep(0.05)

    def _check_end(self, running: "asyncio.Future[None]") -> None:
        error = running.exception()
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        losses = self.traffic.num_losses
        if error is not None and not isinstance(error, EngineDied):
            raise SimCrash(f"{type(error).__name__}: {error}") from error
        if error is not None and self.traffic.has_started and losses <= self.plan.max_restarts:
            raise SimIncorrect(f"it ends after {losses} losses, {self.plan.max_restarts} were allowed: {error}")
        if any(not one.is_gone for one in self.workers):
            raise SimIncorrect("a worker is left behind")
        if error is not None:
            self.marks["given up" if self.traffic.has_started else "failed at the start"] += 1


def play(plan: Plan) -> WorkerWorld:
    """One run."""
    world = WorkerWorld(plan)
    world.run()
    return world
