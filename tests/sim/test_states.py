"""Runs of models with states: no row goes on from a state that is not its own, and planted bugs are found."""

from collections.abc import Iterable
from functools import cache

import pytest

from server.extensions.chaos.sim import state_mutants
from server.extensions.chaos.sim.dice import WITH_STATES, draw
from server.extensions.chaos.sim.mutants import Mutant, mutants_of
from server.extensions.chaos.sim.state_mutants import a_rejected_token_stays_in_the_state
from server.extensions.chaos.sim.world import RunOutcome
from tests.sim.run import Sweep, explain, play_seed, sweep

NUM_QUICK_SEEDS = 4
NUM_SEEDS = 100  # that have to pass
SEEDS = range(WITH_STATES, WITH_STATES + 200)
TELLING = [WITH_STATES + number for number in (7, 33, 14, 1, 23)]  # tried first, since they find most planted bugs
SHRINK_S = 20.0
MARKS = (
    "eviction",
    "executors lost",
    "NaN",
    "prefix hit",
    "retraction",
    "snapshot",
    "snapshot evicted for another",
    "snapshot of an output",
    "snapshot twice",
    "pages back from host",
    "state before a wrong token",
    "state from host",
    "state from the store",
    "state of a retracted row",
    "state to host",
    "states for two rows",
)


def check(result: Sweep) -> None:
    assert not result.failures, explain(result.failures, SHRINK_S)


def test_some_seeds_pass() -> None:
    check(sweep(NUM_QUICK_SEEDS, jobs=1, first=WITH_STATES))


@pytest.mark.slow
def test_hundreds_of_seeds_pass_and_everything_happens_in_them() -> None:
    result = sweep(NUM_SEEDS, jobs=2, first=WITH_STATES)
    check(result)
    assert not (missing := [mark for mark in MARKS if not result.marks[mark]]), missing


def first_failure(mutant: Mutant, seeds: Iterable[int] = SEEDS) -> RunOutcome | None:
    """The first failure of the seeds while the bug is there."""
    with mutant.planted():
        outcomes = (play_seed(seed)[0] for seed in seeds)
        return next((outcome for outcome in outcomes if outcome.failure is not None), None)


@cache
def failure_without(seed: int) -> tuple[str, str] | None:
    """The failure of a seed while no bug is there."""
    return play_seed(seed)[0].failure


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants_of(state_mutants), ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_and_is_what_was_found(mutant: Mutant) -> None:
    failed = first_failure(mutant, [*TELLING, *SEEDS])
    assert failed is not None, f"{mutant.name} survives {len(SEEDS)} seeds"
    assert failure_without(failed.seed) is None, f"seed {failed.seed} fails without {mutant.name} too"


@pytest.mark.slow
def test_so_is_a_rejected_token_of_a_layer_for_multi_token_prediction() -> None:
    """The device drafts as with a head that reads the model's states: pages are known by pairs of tokens."""
    heads = [seed for seed in SEEDS if (setup := draw(seed).setup).proposer and setup.drafted]
    failed = first_failure(a_rejected_token_stays_in_the_state, heads)
    assert failed is not None, f"it survives the {len(heads)} seeds with a head of {len(SEEDS)}"
    assert failure_without(failed.seed) is None
