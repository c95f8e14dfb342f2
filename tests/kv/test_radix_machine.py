"""Any order of operations against the dict model: every page size, every strategy, with and without a host tier.

Every operation is followed by the tree's ``check`` and by reading back the page behind every token.  hypothesis finds
the shortest way to a fault; long seeded runs reach the states that take hundreds of operations to come about.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.kv.cache_model import STRATEGIES, CacheModel
from tests.kv.operations import NAMES, Operations

MARKS = ("hits", "duplicates", "evicted", "partly", "stale", "grown")


class RadixMachine(RuleBasedStateMachine):
    """Requests come, run in chunks, share, finish, are retracted and evict each other's leftovers."""

    def __init__(self, model: CacheModel) -> None:
        super().__init__()
        self.operations = Operations(model)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def operate(self, name: str, data: st.DataObject) -> None:
        getattr(self.operations, name)(lambda below: data.draw(st.integers(0, below - 1)))

    @invariant()
    def tree_equals_model(self) -> None:
        self.operations.model.check()

    def teardown(self) -> None:
        self.operations.finish()


@pytest.mark.reliability("U1", "radix tree and pages against a dict: inserted, matched, locked, split, evicted, salted")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_hypothesis_finds_no_difference_to_the_model(page_size: int, strategy: str, at_full_size: bool) -> None:
    run_state_machine_as_test(
        lambda: RadixMachine(CacheModel(page_size, strategy, num_host_pages=0)),
        settings=settings(
            max_examples=60 if at_full_size else 20,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def run_long(model: CacheModel, seed: int, num_operations: int) -> Counter[str]:
    """A seeded run; returns what happened."""
    rng = np.random.default_rng(seed)
    operations = Operations(model)
    for _ in range(num_operations):
        name = NAMES[rng.integers(len(NAMES))]
        getattr(operations, name)(lambda below: int(rng.integers(below)))
        model.check()
    operations.finish()
    return Counter(model.seen)


@pytest.mark.reliability("U1", "radix tree and pages against a dict: inserted, matched, locked, split, evicted, salted")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_long_runs_do_not_differ_from_the_model(page_size: int, strategy: str, at_full_size: bool) -> None:
    num_seeds = 4 if at_full_size else 2
    seen = sum((run_long(CacheModel(page_size, strategy), seed, 250) for seed in range(num_seeds)), Counter())
    # A run in which nothing scarce happened proves nothing.
    assert all(seen[mark] > 5 for mark in MARKS), seen


@pytest.mark.parametrize("num_host_pages", [3, 25])
@pytest.mark.parametrize("page_size", [1, 4])
def test_long_runs_with_a_host_tier_do_not_differ_from_the_model(page_size: int, num_host_pages: int) -> None:
    models = [CacheModel(page_size, num_pages=24, num_host_pages=num_host_pages) for _ in range(2)]
    seen = sum((run_long(model, seed, 250) for seed, model in enumerate(models)), Counter())
    assert seen["restored"], seen


def test_long_runs_over_pairs_of_tokens_do_not_differ_from_the_model() -> None:
    seen = run_long(CacheModel(4, bigram=True), 0, 500)
    assert all(seen[mark] for mark in MARKS), seen
