"""A thousand replicas for an hour, in virtual time: the ways to choose a replica, with failures and autoscaling.

    python benchmarks/bench_thousand_replicas.py --json benchmarks/results/thousand_replicas_2core_cpu.json

Each replica is the real planner with its radix tree and the watcher that reports what the tree holds; each router is
the real ``Replicas`` with its memory of prefixes (``server/proxy/affinity.py``) and shares nothing with the others.
HTTP, the device and time are simulated.  Steps take what a model of measured steps says: ``--trace FILE`` fits it to a
recording of a server (``storage.trace_mb``), else it is the assumed one written below.

The hour has three kinds of traffic.  Chat: conversations of a few turns that share system prompts.  Batch: documents of
a few thousand tokens, each asked about some times.  Agents: sessions of many turns whose prompt grows by what tools
answered.  A turn comes after the answer of the last one.  In the hour replicas die and come back with an empty cache, a
rack of them dies, and so does a router.
"""

import argparse
import heapq
import json
import logging
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.features.quarantine.planner import QuarantinePlanner
from engine.features.shared_prefix.planner import SharedPrefixPlanner
from engine.features.traffic.sizes import StepSize, StepSizes
from engine.messages import Admit, Tokens
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.plugins.policy.fcfs import FirstComeFirstServed
from engine.scheduling.planner import Planner
from engine.scheduling.playback import Playback
from engine.scheduling.rows import PlannerLimits
from engine.types.params import SamplingParams
from server.extensions.replicas.held import HeldPrompts, blocks_part
from server.extensions.replicas.replicas import Replicas
from server.extensions.replicas.routing import ROUTINGS, PowerOfTwoRouting, RoutingPolicy
from server.proxy.affinity import PrefixAffinity
from server.proxy.replica import State

HOUR_S = 3600.0
BLOCK_TOKENS = 64  # of a prompt, one hash of the router's each; text has about so many in its blocks of 256 bytes
REPORT_S = 0.05  # until routers know what a replica holds, as ``held.LOOK_EVERY_S``
RACK = 20
SENT = "prefix_sent"  # as ``prefix``, with what each router has sent in place of what replicas report
CHAT, BATCH, AGENT = "chat", "batch", "agent"


def default_seconds(size: StepSize) -> float:
    """The time of a step on an assumed server with a slow processor: 80 ms, and 4 ms a prompt token.

    So an hour has load without having ten million steps."""
    return 0.08 + 0.004 * size.decodes + 2e-7 * size.context + 0.004 * size.prefill_tokens + 1e-7 * size.pairs


@dataclass(slots=True)
class Turn:
    """A request.  prompt: tokens.  think_s: from the answer before to it.  tail: the turns that follow."""

    kind: str
    session: int
    prompt: np.ndarray
    num_output: int
    at: float
    tail: "deque[tuple[float, np.ndarray, int]]"
    first_at: float = 0.0
    num_cached: int = 0
    num_tries: int = 0
    blocks: list[bytes] | None = None


class Traffic:
    """The sessions of an hour, by their first turns in order of time."""

    def __init__(self, seed: int, sessions_per_s: float, span_s: float) -> None:
        rng = np.random.default_rng(seed)
        self.first: list[Turn] = []
        systems = [rng.integers(2, 1 << 30, 512, dtype=np.int32) for _ in range(24)]
        tools = [rng.integers(2, 1 << 30, 6144, dtype=np.int32) for _ in range(8)]
        documents = [rng.integers(2, 1 << 30, int(rng.integers(2048, 8192)), dtype=np.int32) for _ in range(400)]
        at, session = 0.0, 0
        while (at := at + float(rng.exponential(1 / sessions_per_s))) < span_s:
            session += 1
            kind = (CHAT, BATCH, AGENT)[int(rng.choice(3, p=(0.55, 0.3, 0.15)))]
            stem, turns, more, output, think = {
                CHAT: (systems[int(rng.integers(24))], int(rng.integers(1, 7)), (40, 300), (8, 24), 20.0),
                BATCH: (documents[int(rng.zipf(1.3)) % 400], 1, (30, 90), (4, 12), 0.0),
                AGENT: (tools[int(rng.integers(8))], int(rng.integers(6, 24)), (200, 1500), (6, 20), 3.0),
            }[kind]
            steps = [
                (
                    float(rng.exponential(think)) if think else 0.0,
                    rng.integers(2, 1 << 30, int(rng.integers(*more)), dtype=np.int32),
                    int(rng.integers(*output)),
                )
                for _ in range(turns)
            ]
            _, asked, num_output = steps[0]
            prompt = np.concatenate((stem, asked))
            self.first.append(Turn(kind, session, prompt, num_output, at, deque(steps[1:])))


class SimulatedReplica:
    """One replica: planner, cache, watcher.  It dies and comes back with nothing."""

    def __init__(self, number: int, limits: PlannerLimits, seconds: Callable[[StepSize], float], depth: int) -> None:
        self.number, self.name = number, f"replica{number}"
        self._limits, self._step_seconds, self._depth = limits, seconds, depth
        self.is_alive = False
        self.busy_s = 0.0
        self.version = 0

    def start(self, now: float) -> None:
        """Begin with an empty cache."""
        self.held = HeldPrompts()
        self._sizes = StepSizes(self._limits.max_running)
        self.playback = Playback(self._planner, self._script, self._seconds, depth=self._depth, now=now)
        self.planner = self.playback.planner
        self.turns: dict[int, tuple[Turn, int]] = {}
        self._arriving: deque[Callable[[], None]] = deque()
        self._times = self.playback.times(self._arrive)
        self.is_alive = True
        self.due = np.inf
        self._is_asleep = True
        self.known: dict[int, tuple[str, int]] = {}

    def _planner(self, clock: Callable[[], float]) -> Planner:
        features = (SharedPrefixPlanner, QuarantinePlanner)
        return Planner(
            self._limits, LeastRecentlyUsed(), FirstComeFirstServed(), clock, features=features, watchers=(self.held,)
        )

    def _script(self, admission: Any) -> np.ndarray:
        turn, _ = self.turns[admission.params.seed]
        return np.concatenate((turn.prompt, np.full(turn.num_output, 1, dtype=np.int32)))

    def _seconds(self, step: Any) -> float:
        took_s = self._step_seconds(self._sizes.measure(step))
        self.busy_s += took_s
        return took_s

    def _arrive(self) -> float:
        return np.inf

    def admit(self, request_id: int, turn: Turn, router: int, now: float) -> None:
        """Take a request."""
        self.turns[request_id] = turn, router
        self.playback.now = max(self.playback.now, now)
        self.planner.admit(
            Admit(
                request_id=request_id,
                token_ids=turn.prompt.tobytes(),
                params=SamplingParams(max_tokens=turn.num_output, seed=request_id, ignore_eos=True),
                parts=blocks_part(turn.blocks or []),
            )
        )
        self.wake()

    def wake(self) -> float:
        """Plan what can be planned; returns when the next step is done."""
        if self._is_asleep:
            self._times = self.playback.times(self._arrive)
        self.due = next(self._times, np.inf)
        self._is_asleep = self.due == np.inf
        return self.due


class Fleet:
    """An hour of a fleet with one way to choose."""

    def __init__(self, arguments: argparse.Namespace, policy: str, seconds: Callable[[StepSize], float]) -> None:
        self.arguments, self.policy = arguments, policy
        limits = PlannerLimits(
            max_running=arguments.rows,
            max_step_tokens=2048,
            prefill_chunk=2048,
            page_size=64,
            num_pages=arguments.pages,
            max_len=24_576,
            eos_token_ids=(0,),
            num_host_pages=0,
            itl_target_s=0.0,
            record_events=False,
        )
        self.replicas = [SimulatedReplica(number, limits, seconds, 2) for number in range(arguments.replicas)]
        self.rng = random.Random(arguments.seed)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._next_id = 0
        self.now = 0.0
        self.done: list[Turn] = []
        self.num_retried = self.num_lost = self.num_steps = 0
        self.choose_s = 0.0
        self.scale: list[tuple[float, int, float]] = []
        self.routers = [self._router() for _ in range(arguments.routers)]
        self.active = min(arguments.start or arguments.replicas, arguments.replicas)
        for replica in self.replicas[: self.active]:
            self._come_up(replica)

    def _router(self) -> Replicas:
        routing: RoutingPolicy = (
            PowerOfTwoRouting(self.rng)
            if self.policy == "power_of_two"
            else ROUTINGS["prefix" if self.policy == SENT else self.policy]()
        )
        fleet: Any = argparse.Namespace(size=self.arguments.replicas, headers={})
        router = Replicas(fleet, None, PrefixAffinity(), 30.0, routing)  # type: ignore[arg-type]
        for one, replica in zip(router.all, self.replicas, strict=True):
            one.state = State.READY if replica.is_alive else State.STARTING
        return router

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do something later."""
        self._num_events += 1
        heapq.heappush(self.events, (when, self._num_events, what))

    def run(self) -> None:
        """Let the hour pass."""
        traffic = Traffic(self.arguments.seed, self.arguments.sessions, self.arguments.seconds)
        for turn in traffic.first:
            self.at(turn.at, lambda turn=turn: self._ask(turn))  # type: ignore[misc]
        self._plan_faults()
        if self.arguments.start:
            self.at(15.0, self._autoscale)
        self.drain()

    def drain(self) -> None:
        """Let all happen that is planned."""
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            what()

    # ---- requests -------------------------------------------------------------------------------

    def _ask(self, turn: Turn) -> None:
        if turn.blocks is None:
            turn.blocks = blocks_of(turn.prompt)
        router_number = self.rng.randrange(len(self.routers))
        router = self.routers[router_number]
        began = time.process_time()
        chosen = router.choose(turn.blocks, [])
        self.choose_s += time.process_time() - began
        replica = self.replicas[int(chosen.name.removeprefix("replica"))]
        if not replica.is_alive:
            router.lose(chosen, "it does not answer")
            self.num_retried += 1
            self.at(self.now + 0.01, lambda: self._ask(turn))
            return
        chosen.num_open += 1
        chosen.num_sent += 1
        chosen.open_blocks += len(turn.blocks)
        self._next_id += 1
        replica.admit(self._next_id, turn, router_number, self.now)
        self._schedule(replica)

    def _schedule(self, replica: SimulatedReplica) -> None:
        replica.version += 1
        if replica.due < np.inf:
            version = replica.version
            self.at(replica.due, lambda: self._step(replica, version))

    def _step(self, replica: SimulatedReplica, version: int) -> None:
        if not replica.is_alive or version != replica.version:
            return
        self.num_steps += replica.playback.advance(self.now)
        for message in replica.planner.outbox:
            if isinstance(message, Tokens) and message.cached_tokens:
                for request_id, cached in message.cached_tokens.items():
                    turn, _ = replica.turns[request_id]
                    turn.first_at, turn.num_cached = self.now, cached[0] if isinstance(cached, tuple) else cached
                self._report_later(replica)
        replica.planner.outbox.clear()
        for ended in replica.planner.finished:
            self._finish(replica, *replica.turns.pop(ended.request_id))
        replica.planner.finished.clear()
        replica.wake()
        self._schedule(replica)

    def _finish(self, replica: SimulatedReplica, turn: Turn, router: int) -> None:
        self._close(replica, turn, router)
        self.done.append(turn)
        if turn.tail:
            think_s, more, num_output = turn.tail.popleft()
            prompt = np.concatenate((turn.prompt, np.full(turn.num_output, 1, dtype=np.int32), more))
            following = Turn(turn.kind, turn.session, prompt, num_output, self.now + think_s, turn.tail)
            if len(prompt) + num_output < 24_000:
                self.at(following.at, lambda: self._ask(following))

    def _close(self, replica: SimulatedReplica, turn: Turn, router: int) -> None:
        known = self.routers[router].all[replica.number]
        known.num_open = max(0, known.num_open - 1)  # a router that came later knows nothing of those before it
        known.open_blocks = max(0, known.open_blocks - len(turn.blocks or ()))

    def _report_later(self, replica: SimulatedReplica) -> None:
        life = replica.held.epoch
        self.at(self.now + REPORT_S, lambda: self._report(replica, life))

    def _report(self, replica: SimulatedReplica, life: str) -> None:
        if not replica.is_alive or replica.held.epoch != life:
            return
        for number, router in enumerate(self.routers if self.policy != SENT else ()):
            report = replica.held.report(*replica.known.get(number, ("", 0)))
            router._affinity.learn(replica.name, report)
            replica.known[number] = report.epoch, report.version

    # ---- faults and scale -----------------------------------------------------------------------

    def _come_up(self, replica: SimulatedReplica) -> None:
        replica.start(self.now)
        for router in self.routers:
            router.all[replica.number].state = State.READY

    def _kill(self, replica: SimulatedReplica, back_s: float) -> None:
        if not replica.is_alive:
            return
        replica.is_alive = False
        for turn, router in replica.turns.values():
            self._close(replica, turn, router)
            self.num_retried += 1
            self.at(self.now + 0.5, lambda turn=turn: self._ask(turn))  # type: ignore[misc]
        self.at(self.now + back_s, lambda: self._come_up(replica))

    def _plan_faults(self) -> None:
        share, span_s = self.arguments.faults, self.arguments.seconds
        for _ in range(round(share * self.arguments.replicas)):
            replica = self.rng.choice(self.replicas[: self.active])
            self.at(self.rng.uniform(0, span_s), lambda replica=replica: self._kill(replica, 90.0))  # type: ignore[misc]
        if share:
            first = self.rng.randrange(max(1, self.active - RACK))
            for replica in self.replicas[first : first + RACK]:
                self.at(span_s / 2, lambda replica=replica: self._kill(replica, 180.0))  # type: ignore[misc]
            self.at(span_s / 3, self._replace_router)

    def _replace_router(self) -> None:
        """A router dies: the one in its place knows nothing until replicas have reported all that they hold."""
        old, new = self.routers[0], self._router()
        for before, after in zip(old.all, new.all, strict=True):
            after.num_open, after.open_blocks = before.num_open, before.open_blocks
        self.routers[0] = new
        for replica in self.replicas:
            if replica.is_alive:
                replica.known.pop(0, None)
                self._report_later(replica)

    def _autoscale(self) -> None:
        """Once in 15 s, as the autoscaler of Kubernetes: requests that wait or run per replica, to a target."""
        alive = [one for one in self.replicas if one.is_alive]
        load = sum(len(one.turns) for one in alive)
        wanted = max(1, min(len(self.replicas), round(load / self.arguments.target)))
        self.scale.append((self.now, len(alive), load / max(1, len(alive))))
        if wanted > len(alive):
            for replica in [one for one in self.replicas if not one.is_alive][: wanted - len(alive)]:
                self.at(self.now + 60.0, lambda replica=replica: self._come_up(replica))  # type: ignore[misc]
        elif wanted < 0.8 * len(alive):
            for replica in [one for one in alive if not one.turns][: len(alive) - wanted]:
                replica.is_alive = False
                for router in self.routers:
                    router.all[replica.number].state = State.STOPPED
                    router._affinity.forget(replica.name)
        if self.now < self.arguments.seconds:
            self.at(self.now + 15.0, self._autoscale)


def blocks_of(prompt: np.ndarray) -> list[bytes]:
    """The hashes by which routers compare prompts, over blocks that grow as those of text do."""
    import hashlib

    chain, hashes, start, raw = hashlib.blake2b(digest_size=16), [], 0, prompt.tobytes()
    while start < len(raw) and len(hashes) < 160:
        end = start + max(4 * BLOCK_TOKENS, start // 16)
        chain.update(raw[start:end])
        hashes.append(chain.digest())
        start = end
    return hashes


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return float(np.quantile(values, share)) if values else float("nan")


def hour(arguments: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Run an hour and return its figures."""
    seconds = measured_seconds(arguments.trace) if arguments.trace else default_seconds
    logging.disable(logging.CRITICAL)  # a lost replica is a line of each router's log
    began = time.process_time()
    fleet = Fleet(arguments, policy, seconds)
    fleet.run()
    cpu_s = time.process_time() - began
    waits = [turn.first_at - turn.at for turn in fleet.done]
    prompts = sum(len(turn.prompt) for turn in fleet.done)
    figures: dict[str, Any] = {
        "policy": policy,
        "requests": len(fleet.done),
        "steps": fleet.num_steps,
        "cpu_s": cpu_s,
        "first_token_p50_s": percentile(waits, 0.5),
        "first_token_p99_s": percentile(waits, 0.99),
        "cached": sum(turn.num_cached for turn in fleet.done) / prompts,
        "busy": statistics.mean(one.busy_s for one in fleet.replicas) / arguments.seconds,
        "busiest": max(one.busy_s for one in fleet.replicas) / arguments.seconds,
        "retried": fleet.num_retried,
        "choice_us": 1e6 * fleet.choose_s / max(1, fleet._next_id),
        "open_at_end": sum(len(one.turns) for one in fleet.replicas if one.is_alive),
        "first_token_p99_s_by_kind": {
            kind: percentile([t.first_at - t.at for t in fleet.done if t.kind == kind], 0.99)
            for kind in (CHAT, BATCH, AGENT)
        },
    }
    if fleet.scale:
        figures["replicas_over_time"] = [(round(at), count) for at, count, _ in fleet.scale][::8]
    return figures


def measured_seconds(path: Path) -> Callable[[StepSize], float]:
    """The model of steps that a recording has."""
    from engine.features.traffic.trace import read_trace
    from server.extensions.whatif.costs import StepCosts

    return StepCosts(read_trace(path).steps).seconds


def main() -> None:
    """Run every policy, on two processes, and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=[*ROUTINGS, SENT], choices=[*ROUTINGS, SENT])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--routers", type=int, default=3)
    parser.add_argument("--sessions", type=float, default=1.5, help="that begin in a second")
    parser.add_argument("--seconds", type=float, default=HOUR_S)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pages", type=int, default=1200, help="of 64 tokens, in a replica")
    parser.add_argument("--faults", type=float, default=0.1, help="share of the replicas that die in the hour")
    parser.add_argument("--start", type=int, default=0, help="replicas at the beginning, with autoscaling; 0 for all")
    parser.add_argument("--target", type=float, default=2.0, help="requests of a replica that autoscaling aims at")
    parser.add_argument("--trace", type=Path, help="a recording with measured steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one", choices=[*ROUTINGS, SENT], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(hour(arguments, arguments.one)))
        return
    rest = [one for one in sys.argv[1:] if one not in arguments.policies and one != "--policies"]
    rows: list[dict[str, Any]] = []
    waiting, running = list(arguments.policies), []
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < 2:
            command = [sys.executable, __file__, *rest, "--one", waiting.pop(0)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        output, _ = running.pop(0).communicate()
        rows.append(json.loads(output.splitlines()[-1]))
        print(f"{rows[-1]['policy']}: {rows[-1]['cpu_s']:.0f} s of processor time", file=sys.stderr)
    table = Table(
        "policy",
        "requests",
        "first token p50, ms",
        "p99, ms",
        "over prefix",
        "cached",
        "busiest replica",
        "choice, us",
        "CPU, s",
    )
    base = next((one["first_token_p99_s"] for one in rows if one["policy"] == "prefix"), rows[0]["first_token_p99_s"])
    for one in rows:
        table.add_row(
            one["policy"], f"{one['requests']:,}", f"{1e3 * one['first_token_p50_s']:.0f}",
            f"{1e3 * one['first_token_p99_s']:.0f}", f"{one['first_token_p99_s'] / base:.2f}", f"{one['cached']:.3f}",
            f"{one['busiest']:.2f}", f"{one['choice_us']:.0f}", f"{one['cpu_s']:.0f}",
        )  # fmt: skip
    Console(width=130).print(table)
    print(f"{time.monotonic() - began:.0f} s for all of them, two at a time")
    keep(
        arguments.output,
        {
            "replicas": arguments.replicas,
            "routers": arguments.routers,
            "hours": arguments.seconds / HOUR_S,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
