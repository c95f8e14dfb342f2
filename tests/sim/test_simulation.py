"""Hundreds of runs in which scarce things happen, and nothing goes wrong; ``make simulate`` makes many more."""

import pytest

from server.extensions.chaos.sim.marks import MARKS
from server.extensions.chaos.sim.world import RunOutcome
from tests.sim.run import Sweep, explain, sweep

NUM_QUICK_SEEDS = 10
NUM_SEEDS = 100  # ``make simulate`` runs thousands
SHRINK_S = 20.0


def outcome_of(seed: int, marks: dict[str, int], failure: tuple[str, str] | None = None) -> RunOutcome:
    return RunOutcome(seed=seed, digest=0, virtual_s=2.0, num_steps=10, num_requests=4, marks=marks, failure=failure)


def test_some_seeds_pass() -> None:
    result = sweep(NUM_QUICK_SEEDS, jobs=1)
    assert not result.failures, explain(result.failures, SHRINK_S)
    assert result.num_counted == NUM_QUICK_SEEDS


@pytest.mark.slow
def test_hundreds_of_seeds_pass_and_everything_happens_in_them() -> None:
    result = sweep(NUM_SEEDS, jobs=2)
    assert not result.failures, explain(result.failures, SHRINK_S)
    assert result.num_counted == NUM_SEEDS
    assert not result.missing, f"the sweep is void, these never happened: {result.missing}"


def test_a_run_counts_only_if_two_scarce_things_happened_in_it() -> None:
    assert not outcome_of(1, {}).counts
    assert not outcome_of(1, {"eviction": 3, "crash": 1}).counts
    assert outcome_of(1, {"eviction": 3, "retraction": 1}).counts


def test_a_sweep_adds_up_its_runs_and_names_what_never_happened() -> None:
    result = Sweep()
    result.add(outcome_of(1, {"eviction": 3, "prefix hit": 1}))
    result.add(outcome_of(2, {"eviction": 1}))
    result.add(outcome_of(3, {"crash": 1}, failure=("SimStuck", "waited")))
    assert (result.num_runs, result.num_counted, result.num_steps, result.virtual_s) == (3, 1, 30, 6.0)
    assert result.marks["eviction"] == 2
    assert [failure.seed for failure in result.failures] == [3]
    assert result.missing == [mark for mark in MARKS if mark not in ("eviction", "prefix hit", "crash")]
