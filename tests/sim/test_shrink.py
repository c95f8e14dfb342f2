"""Few operations are left of a failing run, and it still fails the same way."""

import pytest

from engine.features.recording.shrink import shrink
from server.extensions.chaos.sim.dice import draw
from server.extensions.chaos.sim.mutants import a_page_leaks_when_a_row_is_released, an_unlock_is_missed
from tests.sim.run import explain, play_seed, replay_line, shrink_seed

OPS = list(range(40))


def test_only_what_is_needed_is_left() -> None:
    assert shrink(OPS, [0], lambda ops, order: {3, 17, 31} <= set(ops)) == ([3, 17, 31], 0)
    assert shrink(OPS, [0], lambda ops, order: 39 in ops) == ([39], 0)


def test_nothing_is_left_out_that_is_needed() -> None:
    assert shrink(OPS, [0], lambda ops, order: len(ops) == len(OPS)) == (OPS, 0)


def test_another_order_may_fail_with_less() -> None:
    def fails(ops: list[int], order: int) -> bool:
        return 5 in ops and (len(ops) == len(OPS) or order == 2)

    assert shrink(OPS, [0, 1, 2], fails) == ([5], 2)


def test_time_that_is_up_leaves_what_was_found() -> None:
    assert shrink(OPS, [0], lambda ops, order: True, limit_s=0.0) == (OPS, 0)


@pytest.mark.slow
def test_a_failing_seed_becomes_a_few_operations_that_fail_the_same_way() -> None:
    with an_unlock_is_missed.planted():
        whole, _ = play_seed(0)
        ops, order = shrink_seed(0, limit_s=20.0)
        part, _ = play_seed(0, order, ops)
    assert whole.failure is not None
    assert part.failure is not None
    assert part.failure[0] == whole.failure[0]
    assert len(ops) <= len(draw(0).ops) // 4
    assert set(ops) <= set(draw(0).ops)


def test_a_failure_is_told_with_the_lines_that_replay_it() -> None:
    with a_page_leaks_when_a_row_is_released.planted():
        outcomes = [play_seed(seed)[0] for seed in (1, 0)]
        text = explain(outcomes, limit_s=5.0)
        ops, order = shrink_seed(0, limit_s=5.0)
    assert "seed 0 FAILED, SimIncorrect" in text
    assert replay_line(0) in text.splitlines()[1]
    assert text.endswith(replay_line(0, order, ops))
