"""Planted bugs are found: what the simulation calls right is not right by chance."""

from functools import cache

import pytest

from server.extensions.chaos.sim import mutants
from server.extensions.chaos.sim.mutants import Mutant, mutants_of
from server.extensions.chaos.sim.world import RunOutcome
from tests.sim.run import play_seed

pytestmark = pytest.mark.slow

NUM_SEEDS = 200
# Tried first: quick ones, and some in which executors break, stored pages are damaged or rows take turns.
TELLING = (70, 4, 49, 47, 42, 126, 35, 149)


def first_failure(mutant: Mutant) -> RunOutcome | None:
    """Of the telling seeds and the first ones, the first that fails while the bug is there."""
    with mutant.planted():
        for seed in (*TELLING, *range(NUM_SEEDS)):
            outcome, _ = play_seed(seed)
            if outcome.failure is not None:
                return outcome
    return None


@cache
def failure_without(seed: int) -> tuple[str, str] | None:
    """What the seed fails with while no bug is there."""
    return play_seed(seed)[0].failure


@pytest.mark.parametrize("mutant", mutants_of(mutants), ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_and_is_what_was_found(mutant: Mutant) -> None:
    failed = first_failure(mutant)
    assert failed is not None, f"{mutant.name} survives {NUM_SEEDS} seeds"
    assert failure_without(failed.seed) is None, f"seed {failed.seed} fails without {mutant.name} too"
