"""One life of a split engine: the real planner, both sides of the protocol, a simulated device.

Owns: its steps, its ranks, its death.  Does not know: the network, other engines, what must hold.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine.features.handover.borrower import Borrower
from engine.features.handover.desk import Desk, WantedBytes
from engine.features.handover.lender import Lender, Loan
from engine.features.handover.messages import Borrow, Order, Report, order_of, report_message
from engine.features.handover.planner import HandoverPlanner
from engine.features.handover.sides import Sides
from engine.features.handover.states import Lending
from engine.features.handover.wish import Wish
from engine.features.states.planner import StatesPlanner
from engine.kv.pages import Pages
from engine.messages import Admit, Failed, Step, Tokens
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.plugins.policy.priority import MostUrgentFirst
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.scheduling.feature import NewFeature
from engine.scheduling.planner import Planner
from engine.scheduling.rows import PlannerLimits
from engine.types.params import SamplingParams
from server.extensions.chaos.sim.failures import SimCrash, SimIncorrect
from server.extensions.chaos.sim.probe import wrap
from server.extensions.chaos.sim.store import SimStore
from server.extensions.chaos.split.device import HashedDevice
from server.extensions.chaos.split.job import SplitJob
from server.extensions.chaos.split.setup import MAX_LEN

if TYPE_CHECKING:
    from server.extensions.chaos.split.world import SplitWorld


class SplitEngine:
    """One life of an engine: it never comes back, another one takes its name."""

    def __init__(self, world: "SplitWorld", name: str, life: int) -> None:
        self.world = world
        self.name = name
        self.life = life
        self.is_up = True
        self.jobs: dict[int, SplitJob] = {}
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
            report=partial(self._report_later, executors, rank),
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
        world.flushed(self)

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

    def _report_later(self, executors: tuple[int, int], rank: int, report: Report) -> None:
        call = partial(self._reported, executors, rank, report)
        self.world.after(self.world.hop(), call, in_order=(self, rank, "report"))

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

    def admit(self, job: SplitJob, wish: Wish, num_output: int) -> None:
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
