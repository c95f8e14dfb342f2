"""The pool with real tokenizers behind links that take time, lost at random moments on a virtual clock.

Ingress, pool and tokenizers are the engine's own; every message between pool and tokenizer is encoded and decoded.
The scheduler is a book that gives every request its characters one by one: what must come out is known beforehand.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.actors.ingress import Ingress
from engine.actors.tokenizer import Tokenizer
from engine.messages import Abort, Admit, Finish, Stop, Tokens
from engine.settings.sections import LimitsSection
from engine.types.errors import RequestError
from engine.types.notices import EngineReady
from engine.types.params import SamplingParams
from engine.workers.limits import RestartIntensity
from engine.workers.messages import WorkerAlive, WorkerReady
from engine.workers.tokenizers import TokenizerPool, TokenizerSlot
from engine.workers.wire import Wire
from engine.workers.worker import Reports, WorkerLost
from server.extensions.chaos.sim.codec import SimCodec, text_of
from server.extensions.chaos.sim.loop import SimLoop
from server.extensions.chaos.sim.oracle import VOCAB

STEP_S = 0.01
SILENCE_S = 0.5
NUM_SEEDS = 40


def answer(prompt: list[int], length: int) -> list[int]:
    """The tokens that a request gets."""
    return [(3 + sum(prompt) + 7 * place) % VOCAB for place in range(length)]


class Way:
    """One direction of a link: in order, after a delay, through bytes; nothing arrives once it is cut."""

    def __init__(self, rng: random.Random, deliver: Callable[[Any], None]) -> None:
        self.is_cut = False
        self._rng = rng
        self._deliver = deliver
        self._wire = Wire("sim")
        self._frames: deque[bytes] = deque()
        self._last_due = 0.0

    def put(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        self._frames.append(self._wire.encode(message))
        self._last_due = max(self._last_due, loop.time() + self._rng.choice((0.0, 0.001, 0.02)))
        loop.call_at(self._last_due, self._arrive)

    def _arrive(self) -> None:
        frame = self._frames.popleft()
        if not self.is_cut:
            self._deliver(self._wire.decode(frame))


class Process:
    """A tokenizer that may be lost at any moment, with all that is under way to it and from it."""

    def __init__(self, world: "World", name: str, number: int, reports: Reports) -> None:
        self.name = name
        self.number = number
        self.tokenizer = Tokenizer(capacity=10_000, codec=SimCodec(()), vocab_size=VOCAB)
        self._reports = reports
        self._to, self._back = Way(world.rng, self.tokenizer.inbox.put), Way(world.rng, reports.received)
        self.tokenizer.connect(scheduler=self._back, ingress=self._back)
        self._tasks = [asyncio.ensure_future(self._live(world.rng.random() * 0.2)), asyncio.ensure_future(self._beat())]

    async def _live(self, load_s: float) -> None:
        await asyncio.sleep(load_s)
        self._back.put(WorkerReady())
        await self.tokenizer.run()

    async def _beat(self) -> None:
        while True:
            self._back.put(WorkerAlive())
            await asyncio.sleep(SILENCE_S / 4)

    @property
    def is_lost(self) -> bool:
        return self._to.is_cut

    def die(self, *, quietly: bool) -> None:
        """quietly: as a hang, which nobody tells."""
        self._to.is_cut = self._back.is_cut = True
        if not quietly:
            self._reports.lost(WorkerLost(f"{self.name} was killed"))

    def put(self, message: Any) -> None:
        self._to.put(message)

    async def end(self) -> None:
        self._to.put(Stop())
        await asyncio.wait(self._tasks[:1])

    async def kill(self, *, is_stuck: bool) -> None:
        self._to.is_cut = self._back.is_cut = True
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


class Book:
    """Stands where the scheduler does: a token for everybody in each step, in one message."""

    def __init__(self, pool: TokenizerPool) -> None:
        self.open: dict[int, deque[int]] = {}
        self.ingress: Ingress | None = None
        self._pool = pool

    def put(self, message: Admit | Abort) -> None:
        if isinstance(message, Admit):
            assert message.request_id not in self.open, "a request came twice"
            prompt = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
            self.open[message.request_id] = deque(answer(prompt, message.params.max_tokens or 0))
        elif self.open.pop(message.request_id, None) is not None:
            self._tell([(message.request_id, -1, message.finish)])

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            assert self.ingress is not None
            assert self.open.keys() <= self.ingress._open.keys(), "it works for somebody who is gone"
            lines = []
            for request_id, left in list(self.open.items()):
                token = left.popleft()
                lines.append((request_id, token, Finish.RUNNING if left else Finish.LENGTH))
                if not left:
                    del self.open[request_id]
            if lines:
                self._tell(lines)

    def _tell(self, lines: list[tuple[int, int, Finish]]) -> None:
        ids, tokens, finishes = zip(*lines, strict=True)
        request_ids, token_ids = np.array(ids, dtype=np.int64).tobytes(), np.array(tokens, dtype=np.int32).tobytes()
        self._pool.inbox.put(Tokens(request_ids=request_ids, token_ids=token_ids, finishes=bytes(finishes)))


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.marks: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.num_processes = self.rng.randint(1, 3)
        self.pool = TokenizerPool(
            capacity=10_000,
            num_processes=self.num_processes,
            start=self._start,
            intensity=RestartIntensity(1000, 1.0),
            silence_timeout_s=SILENCE_S,
        )
        self.book = Book(self.pool)
        self.ingress = Ingress(
            capacity=10_000,
            limits=LimitsSection(max_requests=100),
            max_model_len=1000,
            vocab_size=VOCAB,
            rng=self.rng,
            tokenizer=self.pool.inbox,
            parts=("executors", "tokenizers"),
        )
        self.book.ingress = self.ingress
        self.pool.connect(scheduler=self.book, ingress=self.ingress.inbox)

    def _start(self, slot: TokenizerSlot, reports: Reports) -> Process:
        self.processes.append(Process(self, slot.name, slot.number, reports))
        return self.processes[-1]

    async def play(self) -> None:
        """Requests, cancellations and losses; then all must come to rest."""
        running = [asyncio.ensure_future(one) for one in (self.pool.run(), self.ingress.run(), self.book.run())]
        self.ingress.inbox.put(EngineReady())
        await self.ingress.became_ready.wait()
        clients = []
        for _ in range(30):
            clients.append(asyncio.ensure_future(self.client()))
            await asyncio.sleep(self.rng.expovariate(1 / 0.03))
            if self.rng.random() < 0.1:
                self.lose()
        ending = asyncio.gather(*clients)
        await asyncio.wait((ending, *running), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert not [task.result() for task in running if task.done()], "nobody ends before the clients do"
        assert ending.done(), "some stream never ends"
        await asyncio.wait_for(self.rest(), 60)
        self.pool.inbox.put(Stop())
        self.ingress.inbox.put(Stop())
        running[2].cancel()
        await asyncio.wait(running)
        for task in running[:2]:
            task.result()

    def lose(self) -> None:
        """One that lives."""
        living = [one for one in self.processes if not one.is_lost]
        if living:
            victim = self.rng.choice(living)
            # One that loads has two minutes for that, which is too long for a test.
            quietly = self.rng.random() < 0.3 and self.pool.slots[victim.number].is_ready
            victim.die(quietly=quietly)
            self.marks["hang" if quietly else "kill"] += 1
            if self.pool.num_ready == 0:
                self.marks["nobody left"] += 1
            self.marks["encoded again"] += sum(request.again for request in self.pool._requests.values())
            self.marks["moved"] += len(self.pool._router._moved)

    async def client(self) -> None:
        prompt = [self.rng.randrange(90) for _ in range(self.rng.randint(1, 9))]
        length = self.rng.randint(1, 40)
        expected = text_of(answer(prompt, length))
        stop = expected[self.rng.randrange(length)] if self.rng.random() < 0.3 else ""
        params = SamplingParams(max_tokens=length, stop=(stop,) if stop else (), ignore_eos=True)
        stream = self.ingress.open(text_of(prompt) if self.rng.random() < 0.5 else prompt, params)
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 0.06)
            stream.close()
            self.marks["cancelled"] += 1
            if self.rng.random() < 0.5:  # a cancellation that is under way
                await asyncio.sleep(self.rng.random() * 0.02)
                self.lose()
            return
        text = ""
        try:
            async for delta in stream:
                text += delta.text
        except RequestError as error:
            self.marks[error.code] += 1
        else:
            self.marks["stop string" if stop else "whole"] += 1
            assert text == (expected.partition(stop)[0] if stop else expected)
        assert expected.startswith(text), "what came before an error is right"

    async def rest(self) -> None:
        """Nothing is left anywhere, and every slot is taken again."""
        while self.book.open or self.pool.num_ready < self.num_processes or len(self.living) < self.num_processes:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        assert self.ingress.num_open == 0
        assert self.pool._requests == {}
        assert self.pool._router._moved == {}
        assert [one.tokenizer._texts for one in self.living] == [{}] * self.num_processes
        assert not self.ingress.recovering

    @property
    def living(self) -> list[Process]:
        return [one for one in self.processes if not one.is_lost]


def play(seed: int) -> Counter[str]:
    world = World(seed)
    loop = SimLoop(lambda function, arguments: 0.005)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(world.play())
    finally:
        for task in asyncio.all_tasks(loop):  # of a run that failed
            task.cancel()
        loop.call_later(1.0, loop.stop)
        loop.run_forever()
        asyncio.set_event_loop(None)
        loop.close()
    return world.marks


def test_whatever_is_lost_every_request_ends_once_and_nothing_is_left() -> None:
    marks: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        try:
            marks += play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    faults = ("kill", "hang", "nobody left", "encoded again", "moved")
    scarce = (*faults, "cancelled", "tokenizer_lost", "stop string", "whole")
    assert all(marks[mark] > 5 for mark in scarce), f"it was too quiet to mean anything: {marks}"
    assert set(marks) == set(scarce), "no other error than that of a lost tokenizer"
