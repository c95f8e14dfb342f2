"""Planted bugs are found: what the simulation calls right is not right by chance."""

import pytest

from tests.sim.mutants import MUTANTS, Mutant, planted
from tests.sim.run import play_seed
from tests.sim.world import Outcome

NUM_SEEDS = 200
TELLING = (47, 42)  # tried first: what breaks executors, or damages stored pages, is rare among the others


def first_failure(mutant: Mutant) -> Outcome | None:
    """Of the telling seeds and the first ones, the first that fails while the bug is there."""
    with planted(mutant):
        for seed in (*TELLING, *range(NUM_SEEDS)):
            outcome, _ = play_seed(seed)
            if outcome.failure is not None:
                return outcome
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found_and_is_what_was_found(mutant: Mutant) -> None:
    failed = first_failure(mutant)
    assert failed is not None, f"{mutant.__name__} survives {NUM_SEEDS} seeds"
    control, _ = play_seed(failed.seed)
    assert control.failure is None, f"seed {failed.seed} fails without {mutant.__name__} too"
