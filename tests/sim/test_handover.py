"""Pages move between engines whatever is lost or dies; the simulation that shows it finds planted bugs."""

from collections import Counter

import pytest

from server.extensions.chaos.sim.mutants import Mutant, planted
from tests.sim.handover import Setup, World, play
from tests.sim.handover_mutants import MUTANTS

NUM_SEEDS = 150
MUTANT_SEEDS = 200
MARKS = (
    "cancelled",
    "d died",
    "executors lost",
    "group damaged",
    "handed over in part",
    "handed over whole",
    "lapsed",
    "message lost",
    "p died",
    "pages landed",
    "router died",
    "row moved",
    "slow link",
    "state landed",
)


def test_a_prompt_moves_whole_where_nothing_disturbs() -> None:
    seed = next(seed for seed in range(100) if Setup.draw(seed).calm)
    world, failure = play(seed)
    assert failure is None
    assert world.marks["handed over whole"]
    assert not world.marks["handed over in part"]


def test_a_seed_is_a_run() -> None:
    first, again = play(9)[0], play(9)[0]
    assert (first.marks, first.now()) == (again.marks, again.now())


@pytest.mark.slow
def test_each_request_ends_once_with_its_tokens_and_nothing_is_held_whatever_happens() -> None:
    marks: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world, failure = play(seed)
        if failure is not None:
            raise AssertionError(f"python -m tests.sim.handover run --seed {seed}") from failure
        marks += world.marks
    missing = [mark for mark in MARKS if not marks[mark]]
    assert not missing, f"the sweep is void, these never happened: {missing}"


def first_failure(mutant: Mutant) -> World | None:
    """Return the first seed that fails while the bug is there."""
    with planted(mutant, MUTANTS):
        for seed in range(MUTANT_SEEDS):
            world, failure = play(seed)
            if failure is not None:
                return world
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found_and_is_what_was_found(mutant: Mutant) -> None:
    world = first_failure(mutant)
    assert world is not None, f"{mutant.__name__} survives {MUTANT_SEEDS} seeds"
    assert play(world.setup.seed)[1] is None, f"seed {world.setup.seed} fails without {mutant.__name__} too"
