"""The kinds of runs: each makes a world of a seed, lets it live under its faults, and reports what became of it.

Owns: which kinds there are, and what is counted of a run.  Does not know: how many runs there are.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from server.extensions.chaos.checker import check
from server.extensions.chaos.fleet import scenes as fleet
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.rejoin import plan
from server.extensions.chaos.rejoin import scene as rejoin
from server.extensions.chaos.sim import dice, recovery
from server.extensions.chaos.sim.loop import cpu_limit
from server.extensions.chaos.sim.marks import MARKS
from server.extensions.chaos.sim.scenario import Cancel, Jump, Submit, describe
from server.extensions.chaos.sim.world import World
from server.extensions.chaos.split import world as split
from server.extensions.chaos.split.setup import SplitSetup, draw_ops


class RunReport(msgspec.Struct, frozen=True):
    """The report of a run.  events: lines of its log.  faults: by kind.  scarce: what else happened that seldom does.

    found_by: ``rules`` of the simulation or the ``checker``, '' for a run without a failure, which is ``why``."""

    kind: str
    seed: int
    virtual_s: float
    num_asked: int
    num_ended: int
    num_tokens: int
    num_pages_counted: int
    num_events: int
    faults: dict[str, int]
    scarce: dict[str, int]
    found_by: str = ""
    failure: str = ""
    why: str = ""


class RunKind(Protocol):
    """A kind of run.  name: of the kind.  about: a few words for a reader."""

    name: str
    about: str

    def operations(self, seed: int) -> dict[int, str]:
        """Return the operations of a run, in words, by number."""
        ...

    def play(self, seed: int, kept: list[int] | None = None, order: int = 0, ledger: Ledger | None = None) -> RunReport:
        """Run a seed.  kept: of its operations, None for all.  order: the same with other delays."""
        ...


class EngineRuns:
    """One engine: ingress, tokenizer, scheduler, KV, tiers, adapters, tenants, supervisor.  first: of its seeds."""

    def __init__(self, name: str, about: str, first: int) -> None:
        self.name, self.about, self._first = name, about, first

    def operations(self, seed: int) -> dict[int, str]:
        return {number: describe(op) for number, op in dice.draw(self._first + seed).ops.items()}

    def play(self, seed: int, kept: list[int] | None = None, order: int = 0, ledger: Ledger | None = None) -> RunReport:
        ledger = ledger or Ledger()
        scenario = dice.draw(self._first + seed, order)
        if kept is not None:
            scenario = scenario.only(kept)
        world = World(scenario, ledger=ledger)
        with cpu_limit():
            outcome = world.run()
        faults = Counter(type(op).__name__ for op in scenario.ops.values() if not isinstance(op, Submit | Cancel))
        scarce = {name: count for name, count in outcome.marks.items() if name in MARKS}
        jumped_s = sum(op.seconds for op in scenario.ops.values() if isinstance(op, Jump))  # nothing happens in these
        virtual_s = max(0.0, outcome.virtual_s - jumped_s)
        return report(self.name, seed, virtual_s, ledger, faults, scarce, outcome.failure)


class WorkerRuns:
    """The processes of an engine: executors, tokenizers or a frontend that are killed, hang, load late."""

    name, about = "workers", "processes of an engine that die, hang, load late, accept nothing"

    def operations(self, seed: int) -> dict[int, str]:
        return {number: str(fault) for number, fault in recovery.draw(seed).faults.items()}

    def play(self, seed: int, kept: list[int] | None = None, order: int = 0, ledger: Ledger | None = None) -> RunReport:
        ledger = ledger or Ledger()
        plan = recovery.draw(seed)
        if kept is not None:
            plan = plan.only(kept)
        ledger.note("run", seed=seed)
        for fault in plan.faults.values():
            ledger.note("fault", kind=fault.kind)
        world = recovery.play(plan)
        if world.failure is None:
            ledger.note("over")
        failure = None if world.failure is None else (type(world.failure).__name__, str(world.failure))
        faults = Counter(fault.kind for fault in plan.faults.values())
        return report(self.name, seed, world.loop.time(), ledger, faults, dict(world.marks), failure)


class FleetRuns:
    """Replicas behind routers: their choices, what they know of caches, streams that go on elsewhere, the journal."""

    name, about = "fleet", "replicas, routers and racks that die, stop and come back; streams that go on elsewhere"

    def operations(self, seed: int) -> dict[int, str]:
        return fleet.operations(seed)

    def play(self, seed: int, kept: list[int] | None = None, order: int = 0, ledger: Ledger | None = None) -> RunReport:
        ledger = ledger or Ledger()
        scene = fleet.play(seed, kept, order, ledger)
        return report(self.name, seed, scene.virtual_s, ledger, scene.faults, scene.marks, scene.failure)


class RejoinRuns:
    """Journaled streams: clients that come back to them, a server that is killed, or loses power, or a full disk."""

    name, about = "rejoin", "streams with a journal: clients that come back, kills, losses of power, a full disk"

    def operations(self, seed: int) -> dict[int, str]:
        return {number: str(op) for number, op in plan.draw(seed).ops.items()}

    def play(self, seed: int, kept: list[int] | None = None, order: int = 0, ledger: Ledger | None = None) -> RunReport:
        ledger = ledger or Ledger()
        with cpu_limit():
            scene = rejoin.play(plan.draw(seed), kept, order, ledger)
        return report(self.name, seed, scene.loop.time(), ledger, scene.faults, dict(scene.marks), scene.failure)


class SplitRuns:
    """Engines that compute prompts and engines that answer them, with the hand-over of pages between them."""

    name, about = (
        "split",
        "prefill and decode engines that hand pages over, die, are drained; a network that loses",
    )

    def operations(self, seed: int) -> dict[int, str]:
        return {number: str(op) for number, op in draw_ops(SplitSetup.draw(seed)).items()}

    def play(self, seed: int, kept: list[int] | None = None, order: int = 0, ledger: Ledger | None = None) -> RunReport:
        ledger = ledger or Ledger()
        with cpu_limit():
            world, error = split.play(seed, kept, order, ledger)
        faults = Counter(op.kind for op in world.ops.values() if op.kind not in ("Ask", "Leave"))
        failure = None if error is None else (type(error).__name__, str(error))
        return report(self.name, seed, world.time, ledger, faults, dict(world.marks), failure)


KINDS: dict[str, RunKind] = {
    one.name: one
    for one in (
        EngineRuns("engine", "one engine under load, with everything of it that may fail", 0),
        EngineRuns("states", "the same for models with recurrent states", dice.WITH_STATES),
        WorkerRuns(),
        FleetRuns(),
        SplitRuns(),
        RejoinRuns(),
    )
}
# The kinds of one seed after the other.
ROTA = (
    "engine",
    "fleet",
    "split",
    "states",
    "engine",
    "workers",
    "rejoin",
    "split",
)


def kind_of(number: int, only: str = "") -> tuple[RunKind, int]:
    """Return the kind of a run by its number, and the run's seed in that kind.  only: the kind of all runs."""
    return KINDS[only or ROTA[number % len(ROTA)]], number


def report(
    kind: str,
    seed: int,
    virtual_s: float,
    ledger: Ledger,
    faults: Counter[str],
    scarce: dict[str, int],
    failure: tuple[str, str] | None,
) -> RunReport:
    """Let the checker decide about a run that has ended.  failure: what the rules of the simulation say."""
    refused, checker = check(ledger.lines)
    found_by = ""
    if refused or failure:
        found_by = "both" if refused and failure else "checker" if refused else "rules"
    return RunReport(
        kind=kind,
        seed=seed,
        virtual_s=virtual_s,
        num_asked=checker.num_asked,
        num_ended=checker.num_ended,
        num_tokens=checker.num_tokens,
        num_pages_counted=checker.num_pages_counted,
        num_events=len(ledger.lines),
        faults=dict(faults),
        scarce=scarce,
        found_by=found_by,
        failure=failure[0] if failure else "Broken" if refused else "",
        why=(failure[1] if failure else refused)[:300],
    )


def is_alike(failed: RunReport) -> Callable[[RunReport], bool]:
    """Return whether another run fails the same way."""
    return lambda other: other.failure == failed.failure and bool(other.found_by)
