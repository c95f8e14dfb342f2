"""Workers of every kind come back or are given up, whatever befalls them; the simulation that says so finds bugs."""

from collections import Counter

import pytest

from engine.features.recording.shrink import shrink
from server.extensions.chaos.sim import recovery_mutants
from server.extensions.chaos.sim.mutants import Mutant, mutants_of
from server.extensions.chaos.sim.recovery import Plan, WorkerWorld, draw, play
from server.extensions.chaos.sim.recovery_mutants import a_lost_fronts_requests_go_on
from server.extensions.chaos.sim.traffic import KINDS

NUM_SEEDS = 200
MUTANT_SEEDS = 200
MARKS = (
    "deaf",
    "deaf during recovery",
    "failed at the start",
    "given up",
    "hang",
    "hang during recovery",
    "hang while draining",
    "kill",
    "kill during recovery",
    "kill while draining",
    "late readiness",
    "tokenizer_lost",
    "too late",
)


def explain(world: WorkerWorld) -> str:
    """Return the failure of a run, and the fewest faults with which it fails the same way."""
    kept = shrink_plan(world.plan)
    few = "\n".join(f"  {number}: {world.plan.faults[number]}" for number in kept)
    return f"seed {world.plan.seed} ({world.plan.kind}) FAILED: {world.failure!r}\nstill so with faults {kept}:\n{few}"


def shrink_plan(plan: Plan, limit_s: float = 20.0) -> list[int]:
    """The fewest faults of a failing run with which it fails the same way."""
    kind = type(play(plan).failure)
    kept, _ = shrink(list(plan.faults), [0], lambda ops, _: type(play(plan.only(ops)).failure) is kind, limit_s)
    return kept


@pytest.mark.slow
def test_whatever_befalls_workers_all_comes_to_rest_or_is_given_up_in_time() -> None:
    marks: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = play(draw(seed))
        assert world.failure is None, explain(world)
        marks += world.marks
        kinds[world.plan.kind] += 1
    missing = [mark for mark in MARKS if not marks[mark]]
    assert not missing, f"the sweep is void, these never happened: {missing}"
    assert set(marks) == set(MARKS)
    assert set(kinds) == set(KINDS)


def first_failure(mutant: Mutant) -> WorkerWorld | None:
    """Of the first seeds, the first that fails while the bug is there."""
    with mutant.planted():
        for seed in range(MUTANT_SEEDS):
            world = play(draw(seed))
            if world.failure is not None:
                return world
    return None


@pytest.mark.parametrize("mutant", mutants_of(recovery_mutants), ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_and_is_what_was_found(mutant: Mutant) -> None:
    failed = first_failure(mutant)
    assert failed is not None, f"{mutant.name} survives {MUTANT_SEEDS} seeds"
    assert play(failed.plan).failure is None, f"seed {failed.plan.seed} fails without {mutant.name} too"


def test_a_failing_run_becomes_a_short_one_that_fails_the_same_way() -> None:
    failed = first_failure(a_lost_fronts_requests_go_on)
    assert failed is not None
    with a_lost_fronts_requests_go_on.planted():
        kept = shrink_plan(failed.plan)
        again = play(failed.plan.only(kept))
        told = explain(failed)
    assert len(kept) == 1, "one lost frontend is enough"
    assert type(again.failure) is type(failed.failure)
    assert f"seed {failed.plan.seed} (frontend) FAILED" in told


def test_a_seed_is_a_run() -> None:
    for seed in (3, 8, 21):
        first, again = play(draw(seed)), play(draw(seed))
        assert (first.marks, first.loop.time()) == (again.marks, again.loop.time())
        assert [(one.slot.name, one.num_said) for one in first.workers] == [
            (one.slot.name, one.num_said) for one in again.workers
        ]
