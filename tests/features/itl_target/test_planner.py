"""Steps with decodes have only as many prompt tokens as the target allows."""

from dataclasses import replace

import pytest

from tests.scheduling.bench import Bench, prompt_of, segments


def test_the_step_budget_holds_the_itl_target() -> None:
    """A device whose steps take 1 ms and 0.1 ms per prompt token; beside a decode they are to take 5 ms."""
    bench = Bench(depth=1, max_step_tokens=512, prefill_chunk=512, num_pages=800, max_len=2048, itl_target_s=0.005)
    bench.submit(0, prompt_of(4, seed=90), max_tokens=400, ignore_eos=True)

    def timed_step() -> float:
        bench.plan()
        seconds = 0.001 + 0.0001 * sum(segments(bench.steps[-1]).values())
        bench.now += seconds
        bench.deliver()
        return seconds

    for _ in range(5):
        timed_step()
    bench.submit(1, prompt_of(600, seed=1), max_tokens=1)
    while not bench.ends[1]:
        timed_step()
    bench.submit(2, prompt_of(1200, seed=2), max_tokens=1)
    slow = [timed_step() for _ in range(20)]
    assert max(slow) == pytest.approx(0.005, rel=0.05)
    assert bench.streams[0], "the other one got a token in each"


def test_a_change_of_limits_switches_the_target_on_and_off() -> None:
    bench = Bench(depth=1, max_step_tokens=512, prefill_chunk=512, num_pages=800, max_len=2048)
    features = bench.planner.features
    assert not features.prefill_tokens
    limits = bench.planner.requests.limits
    bench.planner.retune(replace(limits, itl_target_s=0.005), bench.planner._policy)
    assert len(features.prefill_tokens) == 1
    bench.planner.retune(limits, bench.planner._policy)
    assert not features.prefill_tokens
