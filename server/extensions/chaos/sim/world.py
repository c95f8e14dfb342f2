"""One run: the real actors on a virtual clock, around a device that remembers what was written where.

Owns: how a scenario is carried out and when it is over.  Does not know: what must hold (``checks.py``).
Ingress, tokenizer, scheduler, planner, allocator, radix tree and supervisor are the engine's own; the links between
them, the executor, the codec's alphabet and the clients are simulated.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.kv.events import KVEvent
from engine.messages import Step, Stop, Tokenize
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.planner import Planner
from engine.types.notices import Message, Reconfigure
from server.extensions.chaos.ledger import Ledger, Note, no_note
from server.extensions.chaos.sim import probe
from server.extensions.chaos.sim.assembly import assemble
from server.extensions.chaos.sim.checks import Checks
from server.extensions.chaos.sim.client import SimClient
from server.extensions.chaos.sim.failures import SimCrash, SimFailure, SimIncorrect, SimStuck
from server.extensions.chaos.sim.loop import SimLoop
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.quiet import check_books, check_quiet
from server.extensions.chaos.sim.scenario import (
    Break,
    Cancel,
    Crash,
    DrainEngine,
    Hang,
    Jump,
    Lose,
    NaN,
    PauseLink,
    Scenario,
    Submit,
)

LIVENESS_S = 60.0
POLL_S = 0.05


class RunOutcome(msgspec.Struct, frozen=True):
    """The outcome of a run.  digest: of every message and when it was sent.  failure: its kind and message."""

    seed: int
    digest: int
    virtual_s: float
    num_steps: int
    num_requests: int
    marks: dict[str, int]
    failure: tuple[str, str] | None = None

    @property
    def counts(self) -> bool:
        """Whether scarce things happened: only then does it mean anything that all went well."""
        kinds = ("eviction", "retraction", "prefix hit", "abort in flight")
        return sum(bool(self.marks.get(kind)) for kind in kinds) >= 2


class Bomb(Message, frozen=True):
    """A message that no actor knows: one that gets it crashes."""


class _Observers:
    """The messages of the scheduler to observers, for the checks."""

    wants_requests = True

    def __init__(self, checks: Checks) -> None:
        self.request_finished: Callable[[Sequence[RequestMetrics]], None] = checks.finished

    def kv_event(self, events: Sequence[KVEvent]) -> None:
        """Events are proved right elsewhere."""

    def close(self) -> None:
        pass


class FixedPlanners:
    """The source of the scheduler's planners, whose settings stay."""

    def __init__(self, overlap_depth: int, build: Callable[[int], Planner]) -> None:
        self.overlap_depth = overlap_depth
        self.build = build

    def change(self, blueprint: bytes) -> None:
        raise NotImplementedError

    def retune(self, planner: Planner) -> None:
        raise NotImplementedError


class World:
    """Everything that exists in one run.  ``log``: gets a line for each event, for a reader."""

    def __init__(
        self, scenario: Scenario, log: Callable[[str], None] | None = None, ledger: Ledger | None = None
    ) -> None:
        self.scenario = scenario
        self.setup = scenario.setup
        self.marks: Counter[str] = Counter()
        self.clients: dict[int, SimClient] = {}
        self.nan_tokens: dict[int, int] = {}
        self.breaks: dict[int, int] = {}
        self.causes: set[str] = set()
        self.checks = Checks(self.setup)
        self.probe: probe.Probe | None = None
        self._log = log
        self._ledger = ledger
        self._note: Note = no_note if ledger is None else ledger.note
        self._op_of: dict[int, int] = {}
        self._opening = 0
        self._stops: list[asyncio.Task[None]] = []
        self._calm_at = 0.0
        self._failure: Exception | None = None
        self.num_steps = 0
        self.loop = SimLoop(self._thread_delay_s)
        self.loop.set_exception_handler(self._on_loop_error)
        if ledger is not None:
            ledger.begin(self.loop.time)
        self.engine = assemble(
            scenario,
            source=FixedPlanners(self.setup.overlap, self._new_planner),
            observers=_Observers(self.checks),
            nan_tokens=self.nan_tokens,
            breaks=self.breaks,
            mark=self.mark,
            op_of=lambda request_id: self._op_of.get(request_id, request_id),
            watch=self._watch,
        )
        self.engine.executor.broke = self._broke
        probe.wrap(self.engine.scheduler, "flush", self._flush)

    # ---- what the engine calls --------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Something scarce has happened."""
        self.marks[name] += 1

    def _new_planner(self, num_pages: int) -> Planner:
        before = self.probe.planner if self.probe is not None else None
        planner = probe.build_planner(self.setup, num_pages, self.loop.time, before)
        self.probe = probe.Probe(
            planner,
            self.mark,
            self.engine.device.poison,
            self.engine.device.will_save,
            self.engine.device.states.lose,
            self.setup.overlap,
        )
        return planner

    def _flush(self, flush: Callable[[], None]) -> None:
        flush()
        if self.probe is not None:
            if self._ledger is not None:
                self._ledger.note_change("pages", counts=self.probe.page_counts, total=self.probe.num_pages)
            self.checks.flushed(self.probe)

    def _watch(self, link: str, message: Message) -> None:
        if isinstance(message, Tokenize):
            self._op_of[message.request_id] = self._opening
        if isinstance(message, Step):
            assert self.probe is not None
            self.num_steps += 1
            self.checks.planned(message, self.probe)
            self.probe.planned(message)
            for admission in message.admissions:
                if len(admission.token_ids) > 4 * admission.num_prompt_tokens:
                    self.mark("resumed with a prefix hit" if admission.num_computed_tokens else "resumed without a hit")
        else:
            self.checks.watch(link, message)
        if self._log is not None:
            self._log(f"{self.loop.time():10.4f} {link:20} {_brief(message)}")

    def _thread_delay_s(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        text = repr(getattr(function, "args", ())[1:])
        weather = self.setup.weather
        return 4 * weather.usual_s * luck(weather.seed, weather.order, 0x7, zlib.crc32(text.encode()))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._fail(context.get("exception") or SimCrash(context["message"]))

    def _fail(self, error: BaseException) -> None:
        """The first failure is the one that counts."""
        if self._failure is None:
            failure = error if isinstance(error, SimFailure) else SimCrash(f"{type(error).__name__}: {error}")
            failure.__cause__ = None if failure is error else error
            self._failure = failure

    # ---- the run ----------------------------------------------------------------------------

    def run(self) -> RunOutcome:
        """Carry out the scenario.  Never raises what the engine did wrong; the outcome says it."""
        self.loop.play(self._play(), self._fail)
        digest = 0
        for link in self.engine.links.values():
            digest = zlib.crc32(link.digest.to_bytes(4, "little"), digest)
        failure = self._failure
        return RunOutcome(
            seed=self.scenario.seed,
            digest=digest,
            virtual_s=self.loop.time(),
            num_steps=self.num_steps,
            num_requests=len(self.clients),
            marks=dict(self.marks),
            failure=(type(failure).__name__, str(failure)) if failure is not None else None,
        )

    @property
    def failure(self) -> Exception | None:
        """Return an error with its traceback."""
        return self._failure

    def _note_head(self) -> None:
        setup = self.setup
        special = list(setup.eos_token_ids)
        self._note("run", seed=self.scenario.seed, vocab=VOCAB, longest=setup.longest, special=special)
        if setup.request_timeout_s < LIVENESS_S:
            self._note("fault", kind="Deadline")

    async def _play(self) -> None:
        self._note_head()
        starting = asyncio.ensure_future(self.engine.supervisor.start())
        try:
            await self._apply_ops()
            await self._wait_until_all_ended()
            await self._settle(starting)
            if not self._stops:
                if self.engine.supervisor.died is None:
                    assert self.probe is not None
                    check_quiet(self.engine, self.probe, self.checks)
                self._stops.append(asyncio.ensure_future(self.engine.supervisor.stop(1.0)))
            await self._wait_for(lambda: all(stop.done() for stop in self._stops), "the engine to stop")
            for stop in self._stops:
                stop.result()
            self._check_stopped()
            self._note("over", died=self.engine.supervisor.died is not None or "drain" in self.causes)
        finally:
            if starting.done() and not starting.cancelled():
                starting.exception()

    async def _apply_ops(self) -> None:
        elapsed = 0.0  # ops know nothing of jumps
        for number, op in self.scenario.ops.items():
            if op.at > elapsed:
                await asyncio.sleep(op.at - elapsed)
                elapsed = op.at
            self._note_failures()
            if self._log is not None:
                self._log(f"{self.loop.time():10.4f} op {number}: {op}")
            self._apply(number, op)

    def _apply(self, number: int, op: Any) -> None:
        now = self.loop.time()
        if not isinstance(op, Submit | Cancel):
            target = {"request": op.request, "token": op.token} if isinstance(op, NaN | Break) else {}
            self._note("fault", kind=type(op).__name__, **target)
        match op:
            case Submit():
                self._open(number, op)
            case Cancel(request=request):
                client = self.clients.get(request)
                if client is not None and client.stream is not None:
                    if probe.is_encoding(self.engine.tokenizer, client.stream.request_id):
                        self.mark("abort before admission")
                    client.cancel()
            case NaN(request=request, token=token):
                self.nan_tokens[request + 1] = token
            case Break(request=request, token=token):
                self.breaks[request + 1] = token
            case PauseLink(link=name, seconds=seconds):
                self.mark("pause")
                link = self.engine.links[name]
                link.pause()
                self.loop.call_later(seconds, link.resume)
                self._calm_at = max(self._calm_at, now + seconds)
            case Hang(seconds=seconds):
                self.mark("hang")
                self.engine.executor.hang(seconds)
                self._calm_at = max(self._calm_at, now + seconds)
            case Lose(seconds=seconds, is_change=is_change):
                if self.engine.executor.lose(is_fault=not is_change):
                    self.mark("executors replaced" if is_change else "executors lost")
                    self.causes.add("executors lost")
                    if is_change:
                        self.engine.scheduler.inbox.put(Reconfigure(renews=True))
                    self._bring_back_after(seconds)
            case Crash(actor=actor):
                if self.engine.supervisor.died is None and not self.engine.supervisor.stopped.is_set():
                    self.mark("crash")
                    self.causes.add("crash")
                    self.engine.actors[actor].inbox.put(Bomb())
            case Jump(seconds=seconds):
                self.mark("clock jump")
                self.loop.jump(seconds)
                self.causes |= {"timeout", "clock jump"}
            case DrainEngine(seconds=seconds):
                self.mark("second stop" if self._stops else "drain")
                self.causes.add("drain")
                self._stops.append(asyncio.ensure_future(self.engine.supervisor.stop(seconds)))

    def _open(self, number: int, op: Submit) -> None:
        self._opening = number
        client = self.clients[number] = SimClient(number, op, self._note)
        full = probe.num_in_house(self.engine.ingress) >= self.setup.max_requests
        # At least what ingress estimates, which for a text is a quarter of its length and one.
        full = full or probe.queued_tokens(self.engine.ingress) + len(op.prompt) + 1 > self.setup.max_queued_tokens
        ready = self.engine.ingress.ready
        client.open(self.engine.ingress, self.setup.longest)
        if client.refusal is not None:
            self.mark(f"refused {client.refusal.status}")
            now = {"full"} if full else set()
            self.checks.check_client(client, None, self.causes | now | (set() if ready else {"loading"}))

    def _broke(self) -> None:
        """A step has ended the device."""
        self.mark("executors broken")
        self._bring_back_after(0.05)

    def _bring_back_after(self, seconds: float) -> None:
        """New executors, ``seconds`` after the scheduler was notified that the old ones are gone.

        Not before what it had sent until then has arrived: their group sits beside the scheduler, and drops that."""

        def forget_steps() -> None:
            # Steps that have just arrived are in the mailbox, to be handled first.
            self.engine.links["scheduler>executor"].call_behind(come_back)

        def come_back() -> None:
            self.loop.call_soon(self.engine.executor.come_back)

        def wait() -> None:
            self.loop.call_later(seconds, forget_steps)

        self.engine.links["executor>scheduler"].call_behind(wait)

    async def _wait_until_all_ended(self) -> None:
        self._calm_at = max(self._calm_at, self.loop.time())
        if self.setup.request_timeout_s < LIVENESS_S:
            self.causes.add("timeout")
        await self._wait_for(lambda: not any(client.is_open for client in self.clients.values()), "all requests to end")
        readers = [client.reading for client in self.clients.values() if client.reading is not None]
        await self._wait_for(lambda: all(reader.done() for reader in readers), "all clients to have read their streams")

    async def _settle(self, starting: asyncio.Future[None]) -> None:
        """Deliver what is under way, and let what runs finish."""
        await self._wait_for(lambda: starting.done(), "the engine to start or fail")
        if self.engine.supervisor.died is None and not self._stops:
            self._calm_at = max(self._calm_at, self.loop.time())
            await self._wait_for(self._is_quiet, "the engine to become quiet")

    def _is_quiet(self) -> bool:
        if self.engine.supervisor.died is not None:
            return True
        assert self.probe is not None
        planner = self.probe.planner
        return not (self.engine.is_anything_under_way or planner.num_in_flight or planner.num_open)

    async def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            self._note_failures()
            if self.loop.time() > self._calm_at + LIVENESS_S:
                late = [client.number for client in self.clients.values() if client.is_open]
                raise SimStuck(f"waited {LIVENESS_S:g} s for {what}; open are operations {late}")
            await asyncio.sleep(POLL_S)
        self._note_failures()

    def _note_failures(self) -> None:
        if self.engine.supervisor.died is not None and "crash" not in self.causes:
            self._fail(probe.cause_of_death(self.engine.supervisor) or self.engine.supervisor.died)
        if self._failure is not None:
            raise self._failure

    # ---- the end ----------------------------------------------------------------------------

    def _check_stopped(self) -> None:
        if not self.engine.supervisor.stopped.is_set():
            raise SimIncorrect("stop has returned, and the engine is not stopped")
        if probe.num_in_house(self.engine.ingress) or probe.queued_tokens(self.engine.ingress):
            count, tokens = probe.num_in_house(self.engine.ingress), probe.queued_tokens(self.engine.ingress)
            raise SimIncorrect(f"{count} requests open or leaving, {tokens} tokens")
        if "crash" in self.causes:
            if self.engine.supervisor.died is None and "drain" not in self.causes:
                raise SimIncorrect("an actor crashed without notice")
        elif self.probe is not None and not self._stopped_early():
            check_books(self.engine, self.probe, self.checks)
        for number, client in self.clients.items():
            if client.stream is not None:
                self._read_at_last(client)
                fatal = self.breaks.get(number + 1)
                self.checks.check_client(client, self.nan_tokens.get(number + 1), self.causes, fatal)
        self.checks.check_sharing([client for client in self.clients.values() if client.stream is not None])
        self._mark_results()

    def _stopped_early(self) -> bool:
        """Whether a stop ran out of patience with a step in flight: one that hangs, or as the clock jumped."""
        if {"hang", "pause"} & self.marks.keys():
            return True
        assert self.probe is not None
        return {"drain", "clock jump"} <= self.causes and self.probe.planner.num_in_flight > 0

    def _read_at_last(self, client: SimClient) -> None:
        """A client that has never read does so now: everything must be there."""
        if client.op.reader != "never" or client.cancelled:
            return
        reading = client.read()
        try:
            reading.send(None)
        except StopIteration:
            return
        reading.close()
        raise SimIncorrect(f"operation {client.number}: ended, and its stream has no end")

    def _mark_results(self) -> None:
        if self.probe is not None and self.probe.planner.meter.num_retractions:
            self.marks["retraction"] += self.probe.planner.meter.num_retractions
        for client in self.clients.values():
            if client.usage is not None and client.usage.cached_tokens:
                self.mark("prefix hit")
            if client.error is not None:
                code = getattr(client.error, "code", "engine_died")
                self.mark(f"failed {code}")
            elif client.stop_reason is not None:
                self.mark("stop string" if isinstance(client.stop_reason, str) else "stop token")


def _brief(message: Message) -> str:
    text = str(msgspec.to_builtins(message) if isinstance(message, Stop) else message)
    return text if len(text) < 400 else f"{text[:400]}..."
