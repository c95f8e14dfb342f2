"""The work that simulated workers of each kind are given by the engine's own owners, and what must hold of it.

Owns: those around an owner (scheduler, ingress, tokenizer), as doubles that check what they get.
Does not know: what befalls the workers, when.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.actors.snapshot import Gauges, Snapshot
from engine.messages import Abort, Admit, Delta, Deltas, Failed, Finish, Step, StepDone, Stop, Tokenize, Tokens
from engine.types.notices import EngineReady, ExecutorsLost, ExecutorsReady, Message, TokenizersLost, TokenizersReady
from engine.types.params import SamplingParams
from engine.workers.executors import Executors, GenerationSettings
from engine.workers.frontend import RemoteIngress
from engine.workers.group import WorkerGroup, WorkerSlot
from engine.workers.limits import RestartIntensity
from engine.workers.tokenizers import TokenizerPool
from engine.workers.worker import WorkerLost
from server.extensions.chaos.sim import probe
from server.extensions.chaos.sim.failures import SimIncorrect

if TYPE_CHECKING:
    from server.extensions.chaos.sim.recovery import SimWorker, WorkerWorld

WORK_S = 0.05
EVERY_S = 0.3  # between pieces of work


class SimWire:
    """Calls a function with what is put."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.put = put


class SimTraffic:
    """One owner and those around it."""

    is_one_for_all = False
    owner: Any

    def __init__(self, world: "WorkerWorld", owner: Any) -> None:
        self.world = world
        self.owner = owner
        self.group: WorkerGroup[Any, Any] = owner._group
        self.num_losses = 0
        self.lost_slots: set[int] = set()
        probe.wrap(self.group._owner, "on_ready", self._watch_ready)
        probe.wrap(self.group._owner, "on_lost", self._watch_lost)

    def work(self, worker: "SimWorker", message: Message) -> None:
        """Do what a worker does with a message."""
        raise NotImplementedError

    def give_work(self) -> None:
        """Give one more piece of it."""
        raise NotImplementedError

    @property
    def is_working(self) -> bool:
        """Whether some piece of work has not ended."""
        raise NotImplementedError

    def began(self, worker: "SimWorker") -> None:
        """A worker has loaded."""

    def check_lost(self, slots: Sequence[WorkerSlot[Any, Any]]) -> None:
        """Check what must hold when the owner has noticed a loss."""

    async def run(self) -> None:
        """The owner, and work for its workers."""
        giving = asyncio.ensure_future(self._give())
        try:
            await self.owner.run()
        finally:
            giving.cancel()

    def stop(self) -> None:
        """Stop as the supervisor does it."""
        self.owner.inbox.put(Stop())

    @property
    def has_started(self) -> bool:
        """Whether all were ready once."""
        return self.group.has_started

    @property
    def is_ready(self) -> bool:
        """Whether every slot has a worker that takes work."""
        return all(slot.is_ready for slot in self.group.slots)

    @property
    def is_quiet(self) -> bool:
        """Whether everything has come to rest."""
        return self.is_ready and not self.is_working

    @property
    def is_dying(self) -> bool:
        """Whether the owner has had more losses than it may have."""
        return self.num_losses > (self.world.plan.max_restarts if self.has_started else 0)

    async def _give(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if not self.world.is_stopped:
                self.give_work()

    def _watch_ready(self, came: Callable[..., None], slots: Any, ready: Any) -> None:
        self.lost_slots -= {slot.number for slot in slots}
        came(slots, ready)

    def _watch_lost(self, went: Callable[..., None], slots: Any, loss: WorkerLost) -> None:
        if any(slot.is_ready for slot in slots):
            raise SimIncorrect(f"{slots[0].name} is lost and takes work")
        self.num_losses += 1
        self.lost_slots |= {slot.number for slot in slots}
        went(slots, loss)
        self.check_lost(slots)


class ExecutorTraffic(SimTraffic):
    """Steps, each to all ranks, one after the other.  A result names the worker that it comes from."""

    is_one_for_all = True

    def __init__(self, world: "WorkerWorld", num_workers: int, intensity: RestartIntensity, silence_s: float) -> None:
        self.can_kill, self.silence_s, self.join_s = True, silence_s, 0.0
        executors = Executors(num_ranks=num_workers, placement=self, intensity=intensity, step_timeout_s=2 * silence_s)
        super().__init__(world, executors)
        executors.connect(SimWire(self._receive))
        self._is_there = False
        self._num_sent = 0
        self._waiting: set[int] = set()

    def generation(self, settings: GenerationSettings) -> Any:
        """Start a worker, as ``ExecutorPlacement`` does."""
        return nullcontext(self.world.start)

    def work(self, worker: "SimWorker", message: Message) -> None:
        assert isinstance(message, Step)
        worker.send(
            StepDone(rank=worker.slot.number, step_id=message.step_id, token_ids=worker.life.to_bytes(4, "little")),
            WORK_S,
        )

    def give_work(self) -> None:
        if self._is_there and not self._waiting:
            self._num_sent += 1
            self._waiting = set(range(len(self.owner.links)))
            for link in self.owner.links:
                link.put(Step(step_id=self._num_sent))

    @property
    def is_working(self) -> bool:
        return bool(self._waiting)

    def _receive(self, message: ExecutorsReady | StepDone | ExecutorsLost) -> None:
        match message:
            case ExecutorsReady():
                if self._is_there or not all(one.is_ready for one in self.world.living):
                    raise SimIncorrect("executors are said to be ready, and one has not loaded")
                self._is_there = True
            case ExecutorsLost():
                self._is_there = False
                self._waiting.clear()
            case StepDone(rank=rank, step_id=step_id):
                life = int.from_bytes(message.token_ids, "little")
                newest = next(one.life for one in self.world.living if one.slot.number == rank)
                if not self._is_there or step_id != self._num_sent or rank not in self._waiting or life != newest:
                    raise SimIncorrect(f"executor{rank} (worker {life} of {newest}) answers step {step_id} out of turn")
                self._waiting.discard(rank)


class TokenizerTraffic(SimTraffic):
    """Requests that are encoded, get one token, and end."""

    def __init__(self, world: "WorkerWorld", num_workers: int, intensity: RestartIntensity, silence_s: float) -> None:
        pool = TokenizerPool(
            capacity=1000,
            num_processes=num_workers,
            start=world.start,
            intensity=intensity,
            silence_timeout_s=silence_s,
        )
        super().__init__(world, pool)
        pool.connect(scheduler=SimWire(self._schedule), ingress=SimWire(self._receive))
        self._num_asked = 0
        self._open: set[int] = set()
        self._scheduled: set[int] = set()
        self._are_there = False

    def work(self, worker: "SimWorker", message: Message) -> None:
        match message:
            case Tokenize(request_id=request_id):
                worker.send(Admit(request_id=request_id, token_ids=bytes(4), params=SamplingParams()), WORK_S)
            case Tokens():
                for request_id in np.frombuffer(message.request_ids, dtype=np.int64).tolist():
                    worker.send(Deltas(deltas=(Delta(request_id=request_id, text="x", finish=Finish.LENGTH),)), WORK_S)

    def give_work(self) -> None:
        for _ in range(3):
            self._num_asked += 1
            self._open.add(self._num_asked)
            self.owner.inbox.put(Tokenize(request_id=self._num_asked, params=SamplingParams(), text="x"))

    @property
    def is_working(self) -> bool:
        return bool(self._open or self._scheduled)

    def check_lost(self, slots: Sequence[WorkerSlot[Any, Any]]) -> None:
        if self._are_there and len(self.lost_slots) == len(self.group.slots):
            raise SimIncorrect("no tokenizer is left, and ingress was not notified")

    def _schedule(self, message: Admit | Abort) -> None:
        if isinstance(message, Abort):
            self._scheduled.discard(message.request_id)
            return
        if message.request_id in self._scheduled or message.request_id not in self._open:
            raise SimIncorrect(f"request {message.request_id} comes twice, or after its end")
        self._scheduled.add(message.request_id)
        self.world.loop.call_later(WORK_S, self._sample, message.request_id)

    def _sample(self, request_id: int) -> None:
        if request_id in self._scheduled:
            self._scheduled.discard(request_id)
            ids = np.array([request_id], dtype=np.int64).tobytes()
            self.owner.inbox.put(Tokens(request_ids=ids, token_ids=bytes(4), finishes=bytes([Finish.LENGTH])))

    def _receive(self, message: Deltas | Failed | TokenizersReady | TokenizersLost) -> None:
        match message:
            case Deltas():
                self._end(*(one.request_id for one in message.deltas))
            case Failed(request_id=request_id):
                self.world.marks["tokenizer_lost"] += 1
                self._end(request_id)
            case TokenizersReady() | TokenizersLost():
                if self._are_there == isinstance(message, TokenizersReady):
                    raise SimIncorrect(f"{type(message).__name__} twice")
                self._are_there = not self._are_there

    def _end(self, *request_ids: int) -> None:
        for request_id in request_ids:
            if request_id not in self._open:
                raise SimIncorrect(f"request {request_id} ends twice")
            self._open.discard(request_id)


class FrontendTraffic(SimTraffic):
    """Requests that a frontend opens, and that end."""

    def __init__(self, world: "WorkerWorld", num_workers: int, intensity: RestartIntensity, silence_s: float) -> None:
        ingress = RemoteIngress(
            capacity=1000,
            tokenizer=SimWire(self._receive),
            start=world.start,
            intensity=intensity,
            silence_timeout_s=silence_s,
        )
        super().__init__(world, ingress)
        ingress.connect(
            look=lambda ask: Snapshot(number=ask.number, now=0.0, gauges=Gauges()),
            watch=lambda observer, name: None,
            profile=lambda ask: None,
        )
        ingress.inbox.put(EngineReady())
        self._next_id = 0
        self._by_worker: dict[int, int] = {}
        self._open: set[int] = set()

    def began(self, worker: "SimWorker") -> None:
        self._next_id = worker.about.first_id

    def work(self, worker: "SimWorker", message: Message) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                if self._by_worker[delta.request_id] != worker.life:
                    raise SimIncorrect(f"a frontend gets request {delta.request_id}, which was another one's")

    def give_work(self) -> None:
        worker = next(iter(self.world.living), None)
        if worker is not None and worker.is_ready and worker.slot.is_ready:
            worker.send(Tokenize(request_id=self._next_id, params=SamplingParams(), text=str(worker.life)))
            self._next_id += 1

    @property
    def is_working(self) -> bool:
        return bool(self._open)

    def stop(self) -> None:
        self.owner.drain()
        super().stop()

    def check_lost(self, slots: Sequence[WorkerSlot[Any, Any]]) -> None:
        if self._open or self.owner.num_open:
            raise SimIncorrect(f"the frontend is lost, and requests {sorted(self._open)} go on")

    def _receive(self, message: Tokenize | Abort) -> None:
        if isinstance(message, Abort):
            self._open.discard(message.request_id)
            return
        if message.request_id in self._by_worker:
            raise SimIncorrect(f"two requests have the id {message.request_id}")
        self._by_worker[message.request_id] = int(message.text or 0)
        self._open.add(message.request_id)
        self.world.loop.call_later(WORK_S, self._end, message.request_id)

    def _end(self, request_id: int) -> None:
        if request_id in self._open:
            self._open.discard(request_id)
            self.owner.inbox.put(Deltas(deltas=(Delta(request_id=request_id, text="x", finish=Finish.LENGTH),)))


KINDS: dict[str, Callable[..., SimTraffic]] = {
    "executors": ExecutorTraffic,
    "tokenizers": TokenizerTraffic,
    "frontend": FrontendTraffic,
}
