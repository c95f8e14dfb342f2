"""Hand-overs between engines in virtual time: real planners, both sides of the protocol, and faults of all kinds.

Owns: the network, the deaths, the router's part, what must hold.  Does not know: how a page is copied for real.
Every engine has a planner with its radix tree, ranks with a lender and a borrower, and a device whose pages are hashes
of all tokens before them.  A router sends each prompt to one engine, and the answer to another one that fetches the
pages.  Messages between engines are lost, doubled, late, overtaken and damaged; engines, their executors and the router
die at any moment.  Whatever happens, each request ends once with the tokens of one undisturbed engine.

    python -m tests.sim.handover sweep --seeds 10000        python -m tests.sim.handover run --seed 17
"""

import argparse
import heapq
import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from engine.features.handover.borrower import Borrower
from engine.features.handover.desk import Desk, WantedBytes
from engine.features.handover.lender import Lender, Loan
from engine.features.handover.messages import (
    Borrow,
    Borrowed,
    Claimed,
    Order,
    Report,
    Returned,
    Wire,
    frame_of,
    landings_of,
    order_of,
    report_message,
    state_number,
    wire_of,
)
from engine.features.handover.planner import HandoverPlanner
from engine.features.handover.sides import Sides
from engine.features.handover.states import Lending
from engine.features.handover.wish import Wish
from engine.features.states.planner import StatesPlanner
from engine.kv.pages import Pages
from engine.messages import Admit, Failed, Finish, Step, StepDone, Tokens
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.plugins.policy.priority import MostUrgentFirst
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.scheduling.feature import NewFeature
from engine.scheduling.planner import Planner
from engine.scheduling.rows import WORTH_WAITING_TOKENS, PlannerLimits
from engine.types.params import SamplingParams
from server.extensions.chaos.sim.device import SimDevice, ints
from server.extensions.chaos.sim.failures import SimCrash, SimFailure, SimIncorrect, SimStuck
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import VOCAB, continuation
from server.extensions.chaos.sim.probe import wrap
from server.extensions.chaos.sim.store import SimStore

MOST_S = 300.0  # of virtual time until all requests have ended
MAX_LEN = 512
KINDS = ("split", "prefix", "plain")


@dataclass(frozen=True, slots=True)
class Setup:
    """One world, drawn from its seed.  calm: no fault, and room for all: then every page must be handed over."""

    seed: int
    calm: bool
    page_size: int
    num_pages: int
    num_ranks: int
    num_rows: int
    lent_share: float
    overlap: int
    num_jobs: int
    lease_s: float
    timeout_s: float
    loss: float
    doubling: float
    damage: float
    delay_s: float
    num_deaths: int
    num_drains: int
    num_cancels: int
    slow: bool
    num_snapshots: int

    @classmethod
    def draw(cls, seed: int) -> "Setup":
        """Return the world of a seed."""
        dice = partial(luck, seed)
        calm = dice(1) < 0.15
        page_size = (4, 8, 16)[int(dice(2) * 3)]
        rough = 0.0 if calm else dice(3)
        return cls(
            seed=seed,
            calm=calm,
            page_size=page_size,
            num_pages=(2048 if calm or dice(5) < 0.25 else 260 + int(dice(4) * 500)) // page_size,
            num_ranks=1 + (dice(6) < 0.4),
            num_rows=6 if calm else 2 + int(dice(19) * 5),
            lent_share=0.5 if calm else 0.3 + 0.7 * dice(20),
            overlap=1 + (dice(7) < 0.5),
            num_jobs=3 + int(dice(8) * 7),
            lease_s=2.0 if calm else 0.2 + dice(9) * 4,
            timeout_s=0.5 + dice(10) * 3,
            loss=0.4 * rough * (dice(11) < 0.6),
            doubling=0.3 * rough * (dice(12) < 0.6),
            damage=0.2 * rough * (dice(13) < 0.4),
            delay_s=0.001 if calm else 0.05 * dice(14) ** 2,
            num_deaths=0 if calm else int(dice(15) * 5),
            num_drains=0 if calm else int(dice(16) * 3),
            num_cancels=0 if calm else int(dice(17) * 3),
            slow=not calm and dice(18) < 0.2,
            num_snapshots=0 if dice(21) < 0.6 else 64 if calm else 7 + int(dice(22) * 8),
        )


class HashedDevice(SimDevice):
    """The device, with pages that land from other engines.  land: gives these, for each rank."""

    land: "Callable[[int, int, int], list[list[memoryview]]]"
    landed_state = b""

    def run(self, step: Step) -> StepDone:
        """Run a step."""
        for one in landings_of(step):
            pages = ints(one.pages).tolist()
            by_rank = self.land(one.number, one.first, len(pages))
            for page, *contents in zip(pages, *by_rank, strict=True):
                if any(bytes(content) != bytes(contents[0]) for content in contents):
                    raise SimIncorrect(f"step {step.step_id}: ranks have different pages of transfer {one.number}")
                self._kv[page] = np.frombuffer(contents[0], dtype=np.uint64)
                self._mark("pages landed")
            if one.with_state:
                self.states.arrived[state_number(one.number)] = np.frombuffer(self.landed_state, dtype=np.uint64)
                self._mark("state landed")
        return super().run(step)

    def content(self, wanted: WantedBytes) -> bytes:
        """Return the bytes of pages and of a state, as they are now."""
        state = self.states.saved(-1, wanted.slot)[wanted.first : wanted.end] if wanted.slot >= 0 else b""
        return self._kv[ints(wanted.pages)].tobytes() + state


@dataclass(slots=True, eq=False)
class Job:
    """A client's request.  got: its output so far.  at: the engine that works for it, with the request's id there."""

    number: int
    kind: str
    prompt: list[int]
    expected: list[int]
    got: list[int] = field(default_factory=list)
    at: "tuple[Engine, int] | None" = None
    leg: str = ""
    prefiller: str = ""
    attempt: int = 0
    ended: str = ""


class Engine:
    """One life of an engine: it never comes back, another one takes its name."""

    def __init__(self, world: "World", name: str, life: int) -> None:
        self.world = world
        self.name = name
        self.life = life
        self.is_up = True
        self.jobs: dict[int, Job] = {}
        self.num_sent = 0
        self.begin(first=True)

    def begin(self, *, first: bool) -> None:
        """Load the executors, at the start and after they were lost."""
        world, setup = self.world, self.world.setup
        self.executors = (self.life, next(world.lives))
        if first:
            limits = PlannerLimits(
                max_running=setup.num_rows, max_step_tokens=96, prefill_chunk=32, page_size=setup.page_size,
                num_pages=setup.num_pages, max_len=MAX_LEN, eos_token_ids=(), num_ranks=setup.num_ranks,
            )  # fmt: skip
            features: list[NewFeature] = [partial(HandoverPlanner, lent_share=setup.lent_share)]
            if setup.num_snapshots:
                features.append(partial(StatesPlanner, policy=EndsAndBranches(), num_slots=setup.num_snapshots))
            self.planner = Planner(limits, LeastRecentlyUsed(), MostUrgentFirst(), world.now, features=features)
            (self.handover,) = (one for one in self.planner.features.all if isinstance(one, HandoverPlanner))
            wrap(self.planner.pages.allocator, "free", self._freed)
        self.device = HashedDevice(
            num_rows=setup.num_rows, num_slots=0, max_len=MAX_LEN, page_size=setup.page_size, num_pages=setup.num_pages,
            num_host_pages=0, store=SimStore(setup.seed, 0.0), nan_tokens={}, breaks={}, draft=lambda *_: [],
            mark=world.mark, num_snapshots=setup.num_snapshots,
        )  # fmt: skip
        self.steps: list[Step] = []
        self.sides = [self._sides(rank) for rank in range(setup.num_ranks)]
        self.device.land = self._land
        self.has_executors = True
        self.flush()

    def _sides(self, rank: int) -> Sides:
        world, setup, executors = self.world, self.world.setup, self.executors
        desk = Desk(
            address=f"{self.name}.{rank}",
            model=b"model",
            page_bytes=8 * setup.page_size,
            state_bytes=8 if setup.num_snapshots else 0,
            send=partial(world.send, rank),
            report=lambda report: world.after(
                world.hop(), partial(self._reported, executors, rank, report), in_order=(self, rank, "report")
            ),
            later=lambda seconds, call: world.after(seconds, lambda: call() if self._runs(executors) else None),
            read=partial(self._read, executors),
        )
        lender = Lender(desk, setup.lease_s, 8 * setup.page_size * (1 + setup.seed % 4))
        wrap(lender, "_lapse", self._lapsed)
        return Sides(lender, Borrower(desk, setup.timeout_s, 1 << 20), lambda name: name)

    def _runs(self, executors: tuple[int, int]) -> bool:
        return self.is_up and self.has_executors and executors == self.executors

    def _freed(self, free: Callable[[Pages], None], pages: Pages) -> None:
        free(pages)
        self.device.poison(pages)

    def _read(self, executors: tuple[int, int], wanted: WantedBytes, done: Callable[[bytes], None]) -> None:
        """Copy pages on a thread: their bytes are those of a moment before the copy is done."""
        at_once, seconds = self.world.dice() < 0.3, self.world.dice() * 0.05
        content = self.device.content(wanted) if at_once else b""

        def finish() -> None:
            if self._runs(executors):
                done(content or self.device.content(wanted))

        self.world.after(seconds, finish)

    def _lapsed(self, lapse: Callable[[bytes, Loan], None], name: bytes, loan: Loan) -> None:
        if loan.state is Lending.LENT:
            self.world.mark("lapsed")
        lapse(name, loan)

    def _land(self, number: int, first: int, count: int) -> list[list[memoryview]]:
        by_rank = [sides.borrower.land(number, first, count) for sides in self.sides]
        if len({state for _, state in by_rank}) > 1:
            raise SimIncorrect(f"{self.name}: ranks have different states of transfer {number}")
        self.device.landed_state = by_rank[0][1]
        return [pages for pages, _ in by_rank]

    # ---- what the scheduler does ------------------------------------------------------------

    def flush(self) -> None:
        """Plan, send and deliver."""
        world = self.world
        if not self.is_up:
            return
        while self.has_executors and self.planner.num_in_flight < world.setup.overlap:
            if (step := self.planner.next_step()) is None:
                break
            self.steps.append(step)
            if len(self.steps) == 1:
                self._begin_step()
        for message in self.planner.outgoing():
            if self.has_executors:
                order = order_of(message)
                for rank in range(world.setup.num_ranks):
                    call = partial(self._ordered, self.executors, rank, order)
                    world.after(world.hop(), call, in_order=(self, rank, "order"))
        for sent in self.planner.outbox:
            match sent:
                case Tokens():
                    self._deliver(sent)
                case Failed():
                    raise SimCrash(f"request {sent.request_id} failed: {sent.message}")
        self.planner.outbox.clear()
        self.planner.finished.clear()
        if world.checks:
            self.planner.check()
            world.check_engine(self)

    def _begin_step(self) -> None:
        executors = self.executors

        def end() -> None:
            if self._runs(executors):
                step = self.steps.pop(0)
                self.planner.complete(self.device.run(step))
                if self.steps:
                    self._begin_step()
                self.flush()

        self.world.after(0.002 + 0.008 * self.world.dice(), end)

    def _ordered(self, executors: tuple[int, int], rank: int, order: Order) -> None:
        if self._runs(executors):
            if isinstance(order, Borrow):
                self.world.borrows[self.name, self.executors, rank, order.number] = 0
            self.sides[rank].take(order)

    def _reported(self, executors: tuple[int, int], rank: int, report: Report) -> None:
        if not self._runs(executors):
            return
        self.world.watch(self, rank, report)
        self.planner.received(report_message(rank, report))
        self.flush()

    def _deliver(self, sent: Tokens) -> None:
        ids, tokens = (
            np.frombuffer(sent.request_ids, np.int64).tolist(),
            np.frombuffer(sent.token_ids, np.int32).tolist(),
        )
        for request, token, finish in zip(ids, tokens, sent.finishes, strict=True):
            job = self.jobs.get(request)
            if finish:
                self.jobs.pop(request, None)
            call = partial(self.world.answered, self, request, job, token, finish)
            self.world.after(self.world.hop(), call, in_order=(self, "client"))

    # ---- what happens to it -----------------------------------------------------------------

    def admit(self, job: Job, wish: Wish, num_output: int) -> None:
        """Begin a request."""
        self.num_sent += 1
        request = self.num_sent
        tokens = np.array(job.prompt + job.got, dtype=np.int32)
        self.jobs[request] = job
        job.at = (self, request)
        self.planner.admit(
            Admit(
                request_id=request,
                token_ids=tokens.tobytes(),
                params=SamplingParams(max_tokens=num_output, temperature=0.0, seed=job.number + 1),
                num_resumed=len(job.got),
                parts=wish.parts(),
            )
        )
        self.flush()

    def abort(self, request: int) -> None:
        """End a request."""
        if self.is_up:
            self.jobs.pop(request, None)
            self.planner.abort(request)
            self.flush()

    def lose_executors(self) -> None:
        """The device is gone; another one comes soon."""
        if not self.has_executors or not self.is_up:
            return
        self.world.mark("executors lost")
        self.has_executors = False
        self.device.forget()
        self.steps.clear()
        self.planner.restart()
        self.flush()
        self.world.after(0.3, lambda: self.begin(first=False) if self.is_up else None)

    def die(self) -> None:
        """The whole process is gone."""
        self.is_up = False


class Timer:
    """A call that is due.  call: None once it was cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Forget the call."""
        self.call = None


class World:
    """All engines, the router and the network of one run."""

    def __init__(self, setup: Setup, *, checks: bool = True, log: Callable[[str], None] | None = None) -> None:
        self.setup = setup
        self.checks = checks
        self.log = log
        self.marks: Counter[str] = Counter()
        self.borrows: dict[tuple[object, ...], int] = {}
        self.loans: Counter[tuple[object, ...]] = Counter()
        self.most_overtaken = 1000
        self.lives = itertools.count()
        self._time = 0.0
        self._queue: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._draws = itertools.count()
        self._last: dict[tuple[object, ...], float] = {}
        self._slow_until = 0.0
        self.engines = {name: Engine(self, name, 0) for name in ("p0", "p1", "d0", "d1")}
        self.jobs = [self._draw_job(number) for number in range(setup.num_jobs)]

    # ---- time and luck ----------------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time."""
        return self._time

    def dice(self) -> float:
        """Return the next draw."""
        return luck(self.setup.seed, 0xD1CE, next(self._draws))

    def hop(self) -> float:
        """Return the time of a message within an engine."""
        return 0.0005 * self.dice()

    def after(self, seconds: float, call: Callable[[], None], in_order: tuple[object, ...] | None = None) -> Timer:
        """Call later.  in_order: calls with the same one keep their order."""
        at = self._time + seconds
        if in_order is not None:
            at = self._last[in_order] = max(at, self._last.get(in_order, 0.0))
        timer = Timer(call)
        heapq.heappush(self._queue, (at, next(self._numbers), timer))
        return timer

    def mark(self, name: str) -> None:
        """Note that something scarce has happened."""
        self.marks[name] += 1

    # ---- the network ------------------------------------------------------------------------

    def send(self, rank: int, address: str, message: Wire, payload: bytes) -> None:
        """Carry a message between ranks of the same number, or do not."""
        setup, frame = self.setup, frame_of(message)
        name, _, number = address.rpartition(".")
        if not name:
            name, number = address, str(rank)
        if self.log is not None:
            self.log(f"{self._time:9.4f} net    -> {name}.{number} {type(message).__name__} {message.name.hex()[:6]}")
        copies = 1 + (self.dice() < setup.doubling)
        for _ in range(copies):
            if self.dice() < setup.loss:
                self.mark("message lost")
                continue
            bytes_sent = payload
            if payload and self.dice() < setup.damage:
                self.mark("group damaged")
                at = int(self.dice() * len(payload))
                bytes_sent = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
            delay = setup.delay_s * 2 * self.dice()
            if self._time < self._slow_until:
                delay += self.dice() * setup.timeout_s * 2
            if copies > 1:
                delay += self.dice() * 2 * setup.lease_s * (self.dice() < 0.2)  # one that comes much later
            self.after(delay, partial(self._arrive, name, int(number), frame, bytes_sent))

    def _arrive(self, name: str, rank: int, frame: bytes, payload: bytes) -> None:
        engine = self.engines[name]
        if engine.is_up and engine.has_executors and rank < len(engine.sides):
            engine.sides[rank].receive(wire_of(frame), payload)

    # ---- the router -------------------------------------------------------------------------

    def _draw_job(self, number: int) -> Job:
        dice = partial(luck, self.setup.seed, 0x10B, number)
        kind = KINDS[0] if dice(1) < 0.7 else KINDS[1 + (dice(2) < 0.3)]
        shared = int(dice(3) * 3)  # some prompts begin alike
        begin = [int(luck(self.setup.seed, shared, at) * VOCAB) for at in range(int(dice(4) * 60))]
        prompt = begin + [int(dice(5, at) * VOCAB) for at in range(1 + int(dice(6) * 160))]
        num_output = 1 + int(dice(7) * 16)
        expected = continuation(np.array(prompt, dtype=np.int32), num_output)
        job = Job(number, kind, prompt, expected)
        self.after(dice(8) * 1.5, partial(self.begin, job))
        return job

    def _up(self, *names: str) -> Engine | None:
        engines = [self.engines[name] for name in names if self.engines[name].is_up]
        return engines[int(self.dice() * len(engines))] if engines else None

    def begin(self, job: Job) -> None:
        """Begin a request, or begin it again."""
        if job.ended:
            return
        job.attempt += 1
        if job.kind == "plain":
            self.second_leg(job)
        elif (engine := self._up("p0", "p1")) is not None:
            job.leg, job.prefiller = "prefill", engine.name
            engine.admit(job, Wish(offer=self._offer(job) if job.kind == "split" else "", id=self._offer(job)), 1)
        else:
            self.second_leg(job)

    def _offer(self, job: Job) -> str:
        return f"{job.number}-{job.attempt}"

    def second_leg(self, job: Job, peer: str = "") -> None:
        """Let another engine answer, with the pages of the first one."""
        if job.ended:
            return
        engine = self._up("d0", "d1")
        if engine is None:
            self.after(0.1, partial(self.second_leg, job, peer))
            return
        job.leg = "decode"
        source = peer or job.prefiller
        job.attempt += 1 if job.got else 0
        wish = Wish()
        if job.kind != "plain" and source != engine.name:
            claim = self._offer(job) if job.kind == "split" and not peer else ""
            wish = Wish(peer=source, claim=claim, id=f"{self._offer(job)}-{next(self._numbers)}")
            size = self.setup.page_size
            if (len(job.prompt) - 1) // size * size >= WORTH_WAITING_TOKENS:
                self.mark("hand-overs due")
        engine.admit(job, wish, len(job.expected))

    def answered(self, engine: Engine, request: int, job: Job | None, token: int, finish: int) -> None:
        """Take a token or an end from an engine."""
        if job is None or job.at != (engine, request) or not engine.is_up:
            return  # nothing waits for it any more
        if job.ended:
            raise SimIncorrect(f"job {job.number} gets more after its end")
        if job.leg == "prefill":
            if finish:
                job.at = None
                self.second_leg(job)
            return
        if token >= 0:
            at = len(job.got)
            job.got.append(token)
            if job.expected[at : at + 1] != [token]:
                raise SimIncorrect(f"job {job.number}: token {at} is {token}, not {job.expected[at : at + 1]}")
        if finish:
            if finish != Finish.LENGTH or job.got != job.expected:
                raise SimIncorrect(f"job {job.number} ends with {len(job.got)} of {len(job.expected)} tokens")
            job.ended, job.at = "done", None

    def _leave(self, job: Job) -> None:
        """Stop waiting for the engine that works for a job."""
        if job.at is not None:
            engine, request = job.at
            job.at = None
            self.after(self.hop(), partial(engine.abort, request))

    # ---- faults -----------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        setup, dice = self.setup, partial(luck, self.setup.seed, 0xFA)
        for number in range(setup.num_deaths):
            at = dice(1, number) * 2.5
            kind = dice(2, number)
            name = ("p0", "p1", "d0", "d1")[int(dice(3, number) * 4)]
            if kind < 0.5:
                self.after(at, partial(self._kill, name))
            elif kind < 0.8:
                self.after(at, partial(self._lose, name))
            else:
                self.after(at, self._kill_router)
        for number in range(setup.num_drains):
            self.after(dice(4, number) * 2.5, partial(self._drain, ("d0", "d1")[int(dice(5, number) * 2)]))
        for number in range(setup.num_cancels):
            job = self.jobs[int(dice(6, number) * len(self.jobs))]
            self.after(dice(7, number) * 2.0, partial(self._cancel, job))
        if setup.slow:
            self.after(dice(8) * 1.5, self._slow_down)

    def _kill(self, name: str) -> None:
        engine = self.engines[name]
        if not engine.is_up:
            return
        self.mark(f"{name[0]} died")
        engine.die()
        orphans = [job for job in self.jobs if job.at is not None and job.at[0] is engine]
        for job in orphans:
            job.at = None
            self.after(self.hop(), partial(self.second_leg, job) if job.leg == "decode" else partial(self.begin, job))
        self.after(0.5, partial(self._revive, name, engine.life + 1))

    def _revive(self, name: str, life: int) -> None:
        self.engines[name] = Engine(self, name, life)

    def _lose(self, name: str) -> None:
        self.engines[name].lose_executors()

    def _kill_router(self) -> None:
        """Every connection is cut; the clients send their requests again."""
        self.mark("router died")
        for job in self.jobs:
            if job.attempt and not job.ended:
                self._leave(job)
                job.got, job.leg = [], ""
                self.after(0.2 + self.dice(), partial(self._again, job))

    def _again(self, job: Job) -> None:
        if job.at is None and not job.ended:
            self.begin(job)

    def _drain(self, name: str) -> None:
        """Move what an engine decodes to another one, which fetches the pages of prompt and output."""
        engine = self.engines[name]
        for job in self.jobs:
            if job.at is not None and job.at[0] is engine and job.leg == "decode" and engine.is_up:
                self.mark("row moved")
                self._leave(job)
                self.after(3 * self.hop(), partial(self._resume, job, name))

    def _resume(self, job: Job, peer: str) -> None:
        if job.at is None and not job.ended and job.leg == "decode":
            self.second_leg(job, peer)

    def _cancel(self, job: Job) -> None:
        if not job.ended and job.attempt:
            self.mark("cancelled")
            self._leave(job)
            job.ended = "cancelled"

    def _slow_down(self) -> None:
        self.mark("slow link")
        self._slow_until = self._time + 3 * self.setup.timeout_s

    # ---- what must hold ---------------------------------------------------------------------

    def watch(self, engine: Engine, rank: int, report: Report) -> None:
        """Check that each transfer and each loan is reported once."""
        if self.log is not None:
            self.log(f"{self._time:9.4f} report {engine.name}.{rank} {type(report).__name__}")
        match report:
            case Borrowed(number=number, num_pages=num_pages):
                key = (engine.name, engine.executors, rank, number)
                self.borrows[key] += 1
                if self.borrows[key] > 1:
                    raise SimIncorrect(f"{engine.name}: transfer {number} is reported twice")
                waiting = engine.handover._waiting.get(number)
                if waiting is not None:
                    wanted = (len(waiting.sequence.tokens) - 1) // self.setup.page_size - waiting.first_page
                    self.mark("handed over whole" if num_pages == wanted else "handed over in part")
                    if self.setup.calm and num_pages < wanted:
                        raise SimIncorrect(f"{engine.name}: {num_pages} of {wanted} pages came, and nothing disturbed")
            case Claimed(claim=claim):
                self.loans[engine.name, engine.executors, rank, claim.name] += 1
                if self.loans[engine.name, engine.executors, rank, claim.name] > 1:
                    raise SimIncorrect(f"{engine.name}: one claim is passed on twice")
            case Returned(name=name):
                self.loans[engine.name, engine.executors, rank, "returned", name] += 1
                if self.loans[engine.name, engine.executors, rank, "returned", name] > 1:
                    raise SimIncorrect(f"{engine.name}: a loan is returned twice")

    def check_engine(self, engine: Engine) -> None:
        """Check that lent pages leave room for every row."""
        planner = engine.planner
        rows = [one for one in planner.table.sequences if one is not None]
        most = max((-(-(one.max_total - 1) // self.setup.page_size) for one in rows), default=0)
        if engine.handover.num_lent + most > self.setup.num_pages:
            raise SimIncorrect(f"{engine.name}: {engine.handover.num_lent} pages are lent beside a row of {most}")

    def _check_rest(self) -> None:
        """Check that nothing is held when all is over."""
        for engine in self.engines.values():
            where, handover, pages = engine.name, engine.handover, engine.planner.pages
            held = [len(one) for one in (handover._loans, handover._offers, handover._waiting, handover._answered)]
            if any(held) or pages.num_kept:
                raise SimIncorrect(f"{where} holds loans, offers, waiting, answered {held}, locks {pages.num_kept}")
            for sides in engine.sides:
                counts = sides.lender.num_loans, sides.borrower.num_transfers, sides.borrower.num_bytes
                if any(counts):
                    raise SimIncorrect(f"{where}: a rank holds loans, transfers, bytes {counts}")
            total = pages.allocator.num_free + pages.tree.num_evictable
            if total != self.setup.num_pages:
                raise SimIncorrect(f"{where}: {self.setup.num_pages - total} pages are in use at the end")

    # ---- the run ----------------------------------------------------------------------------

    def run(self) -> "World":
        """Play until everything is over.  Raises SimFailure."""
        self._plan_faults()
        self._play(lambda: all(job.ended for job in self.jobs), MOST_S, "all requests to end")
        until = self._time + 4 * (self.setup.lease_s + self.setup.timeout_s) + 3.0
        self._play(lambda: self._time >= until, until + 1.0, "leases to end")
        self._check_rest()
        if self.setup.calm and self.marks["lapsed"]:
            raise SimIncorrect("a lease ended by its time, and nothing disturbed")
        return self

    def _play(self, is_over: Callable[[], bool], most_s: float, what: str) -> None:
        while not is_over():
            if not self._queue:
                if what.startswith("leases"):
                    return
                raise SimStuck(f"nothing happens any more, while waiting for {what}")
            at, _, timer = heapq.heappop(self._queue)
            if at > most_s:
                raise SimStuck(f"waited {most_s:g} s for {what}: {[job for job in self.jobs if not job.ended][:2]}")
            if timer.call is not None:
                self._time = at
                timer.call()


def play(seed: int, log: Callable[[str], None] | None = None) -> tuple[World, Exception | None]:
    """Return the run of a seed, and what it has found."""
    world = World(Setup.draw(seed), log=log)
    try:
        return world.run(), None
    except SimFailure as failure:
        return world, failure
    except Exception as error:  # an assertion of the engine, too
        return world, error


def main(arguments: list[str]) -> int:
    """Run seeds, or one with each message."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    sweep = commands.add_parser("sweep")
    sweep.add_argument("--seeds", type=int, default=10_000)
    sweep.add_argument("--first", type=int, default=0)
    one = commands.add_parser("run")
    one.add_argument("--seed", type=int, required=True)
    given = parser.parse_args(arguments)
    if given.command == "run":
        world, failure = play(given.seed, log=print)
        print(world.setup, dict(world.marks))
        if failure is not None:
            traceback.print_exception(failure)
        return int(failure is not None)
    marks: Counter[str] = Counter()
    began, virtual_s = time.monotonic(), 0.0
    for seed in range(given.first, given.first + given.seeds):
        world, failure = play(seed)
        marks += world.marks
        virtual_s += world.now()
        if failure is not None:
            print(f"seed {seed} FAILED: {type(failure).__name__}: {failure}")
            return 1
    print(f"{given.seeds} seeds, {virtual_s / 3600:.1f} simulated hours in {time.monotonic() - began:.0f} s")
    print(msgspec.json.encode(dict(sorted(marks.items()))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
