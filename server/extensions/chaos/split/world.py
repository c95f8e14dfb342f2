"""Split engines under faults: a prompt is computed by one engine and answered by another one, in virtual time.

Owns: the network, the router's part, deaths, what must hold.  Does not know: how a page is copied for real.
Every engine has a planner with its radix tree, ranks with a lender and a borrower, and a device whose pages are hashes
of all tokens before them.  A router sends each prompt to one engine, and the answer to another one that fetches the
pages.  Messages between engines are lost, doubled, late, overtaken and damaged; engines, their executors and the router
die at any moment.  Whatever happens, each request ends once with the tokens of one undisturbed engine.
"""

import itertools
from collections import Counter
from functools import partial

from engine.features.handover.messages import Borrowed, Claimed, Report, Returned, Wire, frame_of, wire_of
from engine.features.handover.wish import Wish
from engine.messages import Finish
from engine.scheduling.rows import WORTH_WAITING_TOKENS
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.sim.failures import SimIncorrect
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.probe import page_counts
from server.extensions.chaos.split.engine import SplitEngine
from server.extensions.chaos.split.job import SplitJob
from server.extensions.chaos.split.setup import (
    DECODERS,
    MAX_LEN,
    PREFILLERS,
    WEATHER,
    SplitOp,
    SplitSetup,
    draw_ops,
)
from server.extensions.chaos.split.virtual_time import VirtualTime

LOST = "lost"  # the leg of a job whose router has died
MOST_S = 300.0  # of virtual time until all requests have ended


class SplitWorld(VirtualTime):
    """All engines, the router and the network of one run.

    ops: by number.  order: the same with other luck on the way.  marks: what scarce things happened."""

    def __init__(self, setup: SplitSetup, ops: dict[int, SplitOp], order: int, ledger: Ledger) -> None:
        super().__init__()
        self.setup = setup
        self.ops = ops
        self.marks: Counter[str] = Counter()
        self.borrows: Counter[tuple[object, ...]] = Counter()
        self.loans: Counter[tuple[object, ...]] = Counter()
        self.lives = itertools.count()
        self._ledger, self._order = ledger, order
        self._names = itertools.count()
        self._requests = itertools.count(setup.num_jobs)
        self._draws = itertools.count()
        self._weather: dict[str, float] = {}
        self._slow_until = 0.0
        ledger.begin(self.now)
        ledger.note("run", world="split", seed=setup.seed, vocab=VOCAB, longest=MAX_LEN, special=[])
        self.engines = {name: SplitEngine(self, name, 0) for name in (*PREFILLERS, *DECODERS)}
        self.jobs = {op.job: SplitJob.draw(setup.seed, op.job) for op in ops.values() if op.kind == "Ask"}

    def dice(self) -> float:
        """Return the next draw."""
        return luck(self.setup.seed, 0xD1CE + self._order, next(self._draws))

    def hop(self) -> float:
        """Return the time of a message within an engine."""
        return 0.0005 * self.dice()

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
        kind, called = type(message).__name__, message.name.hex()[:6]
        self._ledger.note("message", to=f"{name}.{number}", kind=kind, name=called)
        copies = 1 + (self.dice() < self._weather.get("doubling", 0.0))
        for _ in range(copies):
            if self.dice() < self._weather.get("loss", 0.0):
                self.mark("message lost")
                continue
            bytes_sent = payload
            if payload and self.dice() < self._weather.get("damage", 0.0):
                self.mark("group damaged")
                at = int(self.dice() * len(payload))
                bytes_sent = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
            delay = setup.delay_s * 2 * self.dice()
            if self.time < self._slow_until:
                delay += self.dice() * setup.timeout_s * 2
            if copies > 1:
                delay += self.dice() * 2 * setup.lease_s * (self.dice() < 0.2)  # one that comes much later
            self.after(delay, partial(self._arrive, name, int(number), frame, bytes_sent))

    def _arrive(self, name: str, rank: int, frame: bytes, payload: bytes) -> None:
        engine = self.engines[name]
        if engine.is_up and engine.has_executors and rank < len(engine.sides):
            engine.sides[rank].receive(wire_of(frame), payload)

    # ---- the router -------------------------------------------------------------------------

    def _ask(self, job: SplitJob) -> None:
        """Let a client ask, or ask again behind the death of the router."""
        self._ledger.note(
            "asked", request=job.request, prompt=job.prompt, most=len(job.expected), least=len(job.expected),
            stop_ids=[], stops=[], include_stop=False, ignore_eos=True, adapter=0,
        )  # fmt: skip
        self.begin(job)

    def _up(self, *names: str) -> SplitEngine | None:
        engines = [self.engines[name] for name in names if self.engines[name].is_up]
        return engines[int(self.dice() * len(engines))] if engines else None

    def begin(self, job: SplitJob) -> None:
        """Begin a request, or begin it again."""
        if job.ended or job.leg == LOST:
            return
        job.attempt += 1
        if job.kind == "plain":
            self.second_leg(job)
        elif (engine := self._up(*PREFILLERS)) is not None:
            job.leg, job.prefiller = "prefill", engine.name
            engine.admit(job, Wish(offer=self._offer(job) if job.kind == "split" else "", id=self._offer(job)), 1)
        else:
            self.second_leg(job)

    def _offer(self, job: SplitJob) -> str:
        return f"{job.number}-{job.attempt}"

    def second_leg(self, job: SplitJob, peer: str = "") -> None:
        """Let another engine answer, with the pages of the first one."""
        if job.ended or job.leg == LOST:
            return
        engine = self._up(*DECODERS)
        if engine is None:
            self.after(0.1, partial(self.second_leg, job, peer))
            return
        job.leg = "decode"
        source = peer or job.prefiller
        job.attempt += 1 if job.got else 0
        wish = Wish()
        if job.kind != "plain" and source != engine.name:
            claim = self._offer(job) if job.kind == "split" and not peer else ""
            wish = Wish(peer=source, claim=claim, id=f"{self._offer(job)}-{next(self._names)}")
            size = self.setup.page_size
            if (len(job.prompt) - 1) // size * size >= WORTH_WAITING_TOKENS:
                self.mark("hand-overs due")
        engine.admit(job, wish, len(job.expected))

    def answered(self, engine: SplitEngine, request: int, job: SplitJob | None, token: int, finish: int) -> None:
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
            self._ledger.note("tokens", request=job.request, tokens=[token])
            if job.expected[at : at + 1] != [token]:
                raise SimIncorrect(f"job {job.number}: token {at} is {token}, not {job.expected[at : at + 1]}")
        if finish:
            self._ledger.note("end", request=job.request, why=Finish(finish).name.lower())
            if finish != Finish.LENGTH or job.got != job.expected:
                raise SimIncorrect(f"job {job.number} ends with {len(job.got)} of {len(job.expected)} tokens")
            job.ended, job.at = "done", None

    def _leave(self, job: SplitJob) -> None:
        """Stop waiting for the engine that works for a job."""
        if job.at is not None:
            engine, request = job.at
            job.at = None
            self.after(self.hop(), partial(engine.abort, request))

    # ---- faults -----------------------------------------------------------------------------

    def _apply(self, op: SplitOp) -> None:
        if op.kind not in ("Ask", "Leave"):
            self._ledger.note("fault", kind=op.kind, target=op.target)
        match op.kind:
            case "Ask":
                self._ask(self.jobs[op.job])
            case "Leave":
                self._leave_job(self.jobs.get(op.job))
            case "Kill":
                self._kill(op.target)
            case "Lose":
                self.engines[op.target].lose_executors()
            case "Router":
                self._kill_router()
            case "Drain":
                self._drain(op.target)
            case "SlowLink":
                self.mark("slow link")
                self._slow_until = self.time + 3 * self.setup.timeout_s
            case _:
                share = WEATHER[op.kind]
                self._weather[share] = getattr(self.setup, share)

    def _kill(self, name: str) -> None:
        engine = self.engines[name]
        if not engine.is_up:
            return
        self.mark(f"{name[0]} died")
        engine.die()
        orphans = [job for job in self.jobs.values() if job.at is not None and job.at[0] is engine]
        for job in orphans:
            job.at = None
            self.after(self.hop(), partial(self.second_leg, job) if job.leg == "decode" else partial(self.begin, job))
        self.after(0.5, partial(self._revive, name, engine.life + 1))

    def _revive(self, name: str, life: int) -> None:
        self.engines[name] = SplitEngine(self, name, life)

    def _kill_router(self) -> None:
        """Every connection is cut; the clients send their requests again."""
        self.mark("router died")
        for job in self.jobs.values():
            if job.attempt and not job.ended and job.leg != LOST:
                self._leave(job)
                self._ledger.note("end", request=job.request, why="router_lost")
                job.got, job.leg = [], LOST
                self.after(0.2 + self.dice(), partial(self._again, job))

    def _again(self, job: SplitJob) -> None:
        if not job.ended:
            job.request, job.leg = next(self._requests), ""
            self._ask(job)

    def _drain(self, name: str) -> None:
        """Move what an engine decodes to another one, which fetches the pages of prompt and output."""
        engine = self.engines[name]
        for job in self.jobs.values():
            if job.at is not None and job.at[0] is engine and job.leg == "decode" and engine.is_up:
                self.mark("row moved")
                self._leave(job)
                self.after(3 * self.hop(), partial(self._resume, job, name))

    def _resume(self, job: SplitJob, peer: str) -> None:
        if job.at is None and not job.ended and job.leg == "decode":
            self.second_leg(job, peer)

    def _leave_job(self, job: SplitJob | None) -> None:
        if job is not None and not job.ended and job.attempt:
            self.mark("cancelled")
            self._leave(job)
            self._ledger.note("left", request=job.request)
            job.ended = "cancelled"

    # ---- what must hold ---------------------------------------------------------------------

    def watch(self, engine: SplitEngine, rank: int, report: Report) -> None:
        """Check that each transfer and each loan is reported once."""
        self._ledger.note("report", rank=f"{engine.name}.{rank}", kind=type(report).__name__)
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

    def flushed(self, engine: SplitEngine) -> None:
        """Check an engine that has planned and delivered: its books, and that lent pages leave room for every row."""
        planner = engine.planner
        planner.check()
        counts, total = list(page_counts(planner)), self.setup.num_pages
        self._ledger.note_change("pages", pool=engine.name, counts=counts, total=total)
        rows = [one for one in planner.table.sequences if one is not None]
        most = max((-(-(one.max_total - 1) // self.setup.page_size) for one in rows), default=0)
        if engine.handover.num_lent + most > self.setup.num_pages:
            raise SimIncorrect(f"{engine.name}: {engine.handover.num_lent} pages are lent beside a row of {most}")

    def _check_rest(self) -> None:
        """Note what each engine holds when all is over, and check that it is nothing."""
        held: dict[str, list[int]] = {}
        for engine in self.engines.values():
            handover, pages = engine.handover, engine.planner.pages
            counts = [len(one) for one in (handover._loans, handover._offers, handover._waiting, handover._answered)]
            counts += [pages.num_kept, self.setup.num_pages - pages.allocator.num_free - pages.tree.num_evictable]
            for sides in engine.sides:
                counts += [sides.lender.num_loans, sides.borrower.num_transfers, sides.borrower.num_bytes]
            held[engine.name] = counts
            self._ledger.note("held", owner=engine.name, counts=counts)
        self._ledger.note("over")
        if any(map(any, held.values())):
            raise SimIncorrect(f"loans, offers, waiting, answered, locks, pages; loans, transfers, bytes: {held}")

    # ---- the run ----------------------------------------------------------------------------

    def run(self) -> None:
        """Play until everything is over.  Raises what the run found wrong."""
        for op in self.ops.values():
            self.after(op.at, partial(self._apply, op))
        self.play_until(lambda: all(job.ended for job in self.jobs.values()), MOST_S, "requests to end")
        self.rest(4 * (self.setup.lease_s + self.setup.timeout_s) + 3.0)
        self._check_rest()
        if self.setup.calm and self.marks["lapsed"]:
            raise SimIncorrect("a lease ended by its time, and nothing disturbed")


def play(seed: int, kept: list[int] | None, order: int, ledger: Ledger) -> tuple[SplitWorld, Exception | None]:
    """Run a seed, or some of its operations.  Return the world, and what the run itself found wrong."""
    setup = SplitSetup.draw(seed)
    ops = {number: op for number, op in draw_ops(setup).items() if kept is None or number in kept}
    world = SplitWorld(setup, ops, order, ledger)
    try:
        world.run()
    except Exception as error:  # an assertion of the engine, too
        return world, error
    return world, None
