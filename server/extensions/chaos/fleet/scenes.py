"""A fleet under faults: clients, routers without shared memory, replicas in racks, in virtual time.

Owns: what a seed draws, how it is carried out, when it is over.  Does not know: what is right (``checker.py``).
The routers' choice, their watch over replicas, what they learn of caches, and streams that go on elsewhere are the
code that serves (``server/proxy``, ``server/extensions/replicas``); so is each replica's planner.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp.test_utils import make_mocked_request

from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from server.clients import Rates
from server.extensions.chaos.fleet.connections import ClientWriter, SimSession
from server.extensions.chaos.fleet.replica import SimReplica
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.sim.failures import SimIncorrect, SimStuck
from server.extensions.chaos.sim.links import LinkWeather
from server.extensions.chaos.sim.loop import SimLoop
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.scenario import SimSetup
from server.extensions.replicas.replicas import Replicas
from server.http.exchange import EXCHANGE, Exchange
from server.http.sse import DONE
from server.proxy.affinity import PrefixAffinity
from server.proxy.passage import Passage
from server.proxy.proxy import Proxy
from server.proxy.replica import State

LIVENESS_S = 120.0
POLL_S = 0.1
RACK = 3  # replicas in a rack
JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class FleetOp:
    """Something that happens.  kind: Ask, Leave, or a fault.  target: of it, a number."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0

    def __str__(self) -> str:
        if self.kind == "Ask":
            what = f"{len(self.prompt)} tokens for {self.max_tokens} at router {self.target}"
            return f"at {self.at:.2f} s: a request of {what}"
        return f"at {self.at:.2f} s: {self.kind} {self.target}" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass
class FleetPlan:
    """The run of a seed."""

    seed: int
    num_replicas: int
    num_routers: int
    setup: SimSetup
    ops: dict[int, FleetOp] = field(default_factory=dict)


def draw(seed: int) -> FleetPlan:
    """Draw the run of a seed."""
    rng = random.Random(seed * 2 + 1)
    num_replicas, num_routers = rng.choice((2, 3, 4, 6)), rng.choice((1, 1, 2, 3))
    setup = small_setup(rng, seed)
    ops: list[FleetOp] = []
    stems = [tuple(rng.randrange(VOCAB) for _ in range(rng.choice((16, 60, 120)))) for _ in range(3)]
    at = 1.0
    for _ in range(rng.choice((8, 16, 30))):
        at += rng.expovariate(1.0) * rng.choice((0.01, 0.1, 0.4))
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
        prompt = (rng.choice(stems) if rng.random() < 0.7 else ()) + tail
        ops.append(FleetOp(at, "Ask", rng.randrange(num_routers), prompt=prompt, max_tokens=rng.randint(1, 40)))
        if rng.random() < 0.1:
            ops.append(FleetOp(at + rng.uniform(0, 0.6), "Leave", len(ops) - 1))
    kinds = ("Kill", "Kill", "Cut", "Rack", "Restart", "Router")
    for _ in range(rng.choice((0, 1, 2, 4))):
        kind = rng.choice(kinds)
        target = rng.randrange(num_routers if kind == "Router" else num_replicas)
        ops.append(FleetOp(rng.uniform(0.9, at + 0.5), kind, target, rng.choice((0.2, 1.0, 4.0))))
    order = sorted(range(len(ops)), key=lambda number: ops[number].at)
    return FleetPlan(seed, num_replicas, num_routers, setup, {number: ops[number] for number in order})


def small_setup(rng: random.Random, seed: int) -> SimSetup:
    """Draw the sizes of a small engine without tiers, adapters and speculation."""
    page_size = rng.choice((4, 16))
    return SimSetup(
        page_size=page_size,
        num_pages=rng.choice((24, 40, 100)) * (16 // page_size),
        num_host_pages=0,
        store_faults=0.0,
        store_read_s=0.0,
        store_timeout_s=0.0,
        max_running=rng.choice((2, 4, 8)),
        num_slots=0,
        max_step_tokens=rng.choice((32, 128)),
        prefill_chunk=32,
        overlap=1,
        max_len=256,
        eviction=rng.choice(("lru", "slru")),
        policy="fcfs",
        max_overtaken=8,
        itl_target_s=0.0,
        eos_token_ids=(0,),
        max_requests=64,
        max_queued_tokens=1 << 20,
        request_timeout_s=600.0,
        step_s=rng.choice((0.01, 0.03)),
        load_s=0.0,
        record_events=False,
        proposer="",
        num_proposed=0,
        drafted=False,
        check_every=50,
        weather=LinkWeather(seed),
    )


def operations(seed: int) -> dict[int, str]:
    """Return the operations of a seed in words."""
    return {number: str(op) for number, op in draw(seed).ops.items()}


class SimFleet:
    """The fleet that routers restart replicas of.  headers, size: see ``Fleet``."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, replicas: list[SimReplica]) -> None:
        self.size = len(replicas)
        self._replicas = replicas

    async def url(self, number: int) -> str:
        """Return where a replica is, once it is there."""
        while not self._replicas[number].is_alive:  # noqa: ASYNC110 (virtual time costs nothing)
            await asyncio.sleep(POLL_S)
        return f"http://replica{number}"

    async def stop(self, number: int) -> None:
        if self._replicas[number].is_alive:
            self._replicas[number].kill()

    async def start(self, number: int) -> None:
        if not self._replicas[number].is_alive:
            self._replicas[number].start()

    def close(self) -> None:
        """Do nothing: the scene ends its replicas."""


class SimRouter:
    """One router, with a memory of its own."""

    def __init__(self, scene: "Scene") -> None:
        session: Any = SimSession({one.name: one for one in scene.replicas}, scene.delay_s)
        self._affinity = affinity = PrefixAffinity()
        self.replicas = Replicas(SimFleet(scene.replicas), session, affinity, drain_timeout_s=2.0)
        self.proxy = Proxy(ServerSection(), self.replicas, session, affinity, Rates(LimitsSection()))
        self.is_alive = True
        self.tasks = [asyncio.ensure_future(self.replicas.watch(one)) for one in self.replicas.all]
        self.tasks += [asyncio.ensure_future(self.replicas.follow(one)) for one in self.replicas.all]

    def check(self) -> None:
        """Raise SimIncorrect if it believes that a replica without a cache holds a prompt."""
        gone = [one.name for one in self.replicas.all if one.state in (State.STARTING, State.STOPPED)]
        held = [name for name in gone if self._affinity._held.get(name) or name in self._affinity._sent.values()]
        if held:
            raise SimIncorrect(f"a router looks for prompts at {held}, which have lost their caches")

    def kill(self) -> None:
        """End at once."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()


class FleetClient:
    """A client.  It asks again elsewhere if its router dies before it has anything."""

    def __init__(self, scene: "Scene", number: int, op: FleetOp) -> None:
        self.scene, self.number, self.op = scene, number, op
        self.has_ended = self.has_left = False
        self.num_tokens = 0
        self.router: SimRouter | None = None
        self.task = asyncio.ensure_future(self._ask())

    def leave(self) -> None:
        """Go away."""
        if not self.has_ended:
            self.has_left = True
            self.scene.note("left", request=self.number)
            self.task.cancel()

    def router_died(self) -> None:
        """Notice that the connection to the router broke."""
        if self.has_ended or self.has_left:
            return
        self.task.cancel()
        if self.num_tokens:
            self._end("router_lost")
        else:
            self.scene.mark("asked again at another router")
            self.task = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        op = self.op
        body = msgspec.json.encode({"prompt": op.prompt, "max_tokens": op.max_tokens, "number": self.number})
        for _ in range(40):
            self.router = router = self.scene.router(op.target)
            request = make_mocked_request(
                "POST", "/v1/completions", JSON_HEADERS, writer=ClientWriter(self._take), loop=self.scene.loop
            )
            request[EXCHANGE] = Exchange(f"request-{self.number}", "127.0.0.1")
            try:
                response = await router.proxy.send_on(request, body, Passage(body))
            except RequestError as error:
                response = None
                if error.status != 503:
                    self._end(error.code)
                    return
            if response is not None and response.status not in (429, 503):
                break
            await asyncio.sleep(0.5)
        if not self.has_ended:
            self._end("nothing")

    def _take(self, chunk: bytes) -> None:
        for line in chunk.split(b"\n\n"):
            if not line.startswith(b"data: ") or line + b"\n\n" == DONE:
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                self._end(event["error"]["code"])
                return
            if event["tokens"]:
                self.num_tokens += len(event["tokens"])
                self.scene.note("tokens", request=self.number, tokens=event["tokens"])
            if event["finish"]:
                self._end(event["finish"])

    def _end(self, why: str) -> None:
        self.has_ended = True
        self.scene.note("end", request=self.number, why=why)


class Scene:
    """One run.  marks: what scarce things happened.  faults: by kind.  failure: what the run itself found wrong."""

    def __init__(self, plan: FleetPlan, order: int, ledger: Ledger) -> None:
        self.plan, self._order, self._ledger = plan, order, ledger
        self.marks: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.failure: tuple[str, str] | None = None
        self.loop = SimLoop(lambda function, arguments: 0.001)
        self.loop.set_exception_handler(lambda _, context: self._fail(context.get("exception") or context["message"]))
        ledger.begin(self.loop.time)
        self.clients: dict[int, FleetClient] = {}
        self.replicas: list[SimReplica] = []
        self._routers: list[SimRouter] = []
        self._num_draws = 0
        self._later: list[asyncio.Future[Any]] = []

    @property
    def virtual_s(self) -> float:
        """The time that has passed in it."""
        return self.loop.time()

    def note(self, event: str, **fields: Any) -> None:
        """Keep an event."""
        self._ledger.note(event, **fields)

    def mark(self, name: str) -> None:
        """Count a scarce event."""
        self.marks[name] += 1

    def delay_s(self, name: str) -> float:
        """Return the time that the next request to a peer takes."""
        self._num_draws += 1
        return 0.004 * luck(self.plan.seed, self._order, self._num_draws)

    def router(self, number: int) -> SimRouter:
        """Return a router that is there, the numbered one if it is."""
        alive = [one for one in self._routers if one.is_alive]
        wanted = self._routers[number]
        return wanted if wanted.is_alive else alive[number % len(alive)]

    def run(self) -> None:
        """Carry out the plan."""
        self.loop.play(self._play(), self._fail)

    def _fail(self, error: object) -> None:
        if self.failure is None and not isinstance(error, asyncio.CancelledError):
            self.failure = type(error).__name__, str(error)

    def _guarded(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> asyncio.Future[Any]:
        future = asyncio.ensure_future(work)
        self._later.append(future)
        return future

    async def _play(self) -> None:
        setup = self.plan.setup
        self.note("run", seed=self.plan.seed, vocab=VOCAB, longest=setup.longest, special=list(setup.eos_token_ids))
        for number in range(self.plan.num_replicas):
            self.replicas.append(SimReplica(f"replica{number}", setup, self._ledger, self.loop.time, self.mark))
            self.replicas[-1].start()
        self._routers = [SimRouter(self) for _ in range(self.plan.num_routers)]
        for number, op in self.plan.ops.items():
            await asyncio.sleep(max(0.0, op.at - self.loop.time()))
            self._apply(number, op)
            self._check_tasks()
        await self._until(
            lambda: all(one.has_ended or one.has_left for one in self.clients.values()), "requests to end"
        )
        await self._until(lambda: all(one.done() for one in self._later), "restarts to end")
        await self._until(self._is_quiet, "replicas to become quiet")
        self._check_tasks()
        self.note("over")

    def _apply(self, number: int, op: FleetOp) -> None:
        if op.kind == "Ask":
            self.note(
                "asked", request=number, prompt=list(op.prompt), most=op.max_tokens, least=op.max_tokens, stop_ids=[],
                stops=[], include_stop=False, ignore_eos=True, adapter=0,
            )  # fmt: skip
            self.clients[number] = FleetClient(self, number, op)
            return
        if op.kind == "Leave":
            if op.target in self.clients:
                self.clients[op.target].leave()
            return
        self.faults[op.kind] += 1
        self.note("fault", kind=op.kind)
        match op.kind:
            case "Kill":
                self._kill(op.target, op.seconds)
            case "Rack":
                first = op.target // RACK * RACK
                for target in range(first, min(first + RACK, len(self.replicas))):
                    self._kill(target, op.seconds)
            case "Cut":
                self.replicas[op.target].cut_off()
                self.loop.call_later(op.seconds, setattr, self.replicas[op.target], "is_cut_off", False)
            case "Restart":
                replicas = self._routers[0].replicas
                if replicas.all[op.target].state is State.READY and self._routers[0].is_alive:
                    self._guarded(replicas.restart([replicas.all[op.target]]))
            case "Router":
                self._kill_router(op.target)

    def _kill(self, target: int, seconds: float) -> None:
        replica = self.replicas[target]
        if replica.is_alive:
            replica.kill()
            self.loop.call_later(seconds, lambda: None if replica.is_alive else replica.start())

    def _kill_router(self, target: int) -> None:
        router = self._routers[target]
        if any(not one.done() for one in self._later):
            return  # a restart that its router began would never end
        router.kill()
        self._routers[target] = SimRouter(self)
        for client in self.clients.values():
            if client.router is router:
                client.router_died()

    def _is_quiet(self) -> bool:
        return all(one.is_alive and not one.num_open and not one.planner.num_open for one in self.replicas)

    def _check_tasks(self) -> None:
        """Raise what has ended a task that should go on, and for a router that believes what is not so."""
        for router in self._routers:
            if router.is_alive:
                router.check()
        tasks = [task for router in self._routers if router.is_alive for task in router.tasks]
        tasks += [one.task for one in self.replicas if one.task is not None and one.is_alive]
        tasks += [client.task for client in self.clients.values() if not client.has_left]
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        ends_at = self.loop.time() + LIVENESS_S
        while not is_so():
            if self.loop.time() > ends_at:
                raise SimStuck(f"waited {LIVENESS_S:g} s for {what}")
            await asyncio.sleep(POLL_S)
            self._check_tasks()


def play(seed: int, kept: list[int] | None, order: int, ledger: Ledger) -> Scene:
    """Run a seed, or some of its operations."""
    plan = draw(seed)
    if kept is not None:
        plan.ops = {number: op for number, op in plan.ops.items() if number in kept}
    scene = Scene(plan, order, ledger)
    scene.run()
    return scene
