"""What is counted, beside what has happened."""

from collections import Counter

import numpy as np
import pytest

from engine.messages import Finish
from engine.scheduling.meter import NUM_RECENT_STEPS, NUM_SPANS, SPAN_S, Distribution, Meter, Span, StepRecord
from tests.scheduling.bench import Bench


def test_a_distribution_has_every_value_in_the_bucket_of_the_edge_above_it() -> None:
    distribution = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        distribution.note(value)
    distribution.note(1.5, weight=10)
    assert distribution.counts == [2, 12, 2]
    assert distribution.num_seen == 16
    assert distribution.total == pytest.approx(0.5 + 1 + 1.5 * 11 + 2 + 2.5 + 100)


def test_only_the_last_steps_are_kept() -> None:
    meter = Meter(0.0)
    for number in range(NUM_RECENT_STEPS + 50):
        meter.completed(StepRecord(number, number, number + 1, 1, 0, 0, num_next=1, num_first=0))
    assert [step.step_id for step in meter.recent_steps] == list(range(50, NUM_RECENT_STEPS + 50))
    assert meter.num_steps == NUM_RECENT_STEPS + 50
    assert meter.itl_s.counts[meter.itl_s.edges.index(1.0)] == NUM_RECENT_STEPS + 50


def test_the_past_is_kept_in_spans_that_had_steps() -> None:
    meter = Meter(0.0)
    meter.completed(StepRecord(0, 1.0, 1.5, 3, 1, 40, num_next=3, num_first=1))
    meter.completed(StepRecord(1, 2.0, 2.25, 4, 0, 0, num_next=4, num_first=0))
    meter.completed(StepRecord(2, 61.0, 61.5, 2, 0, 0, num_next=2, num_first=0))
    assert meter.history == [Span(0, 2, 8, 40, 4, 0.75), Span(12, 1, 2, 0, 2, 0.5)]
    for number in range(20, 20 + NUM_SPANS):
        meter.completed(StepRecord(number, number * SPAN_S, number * SPAN_S + 1, 1, 0, 0, num_next=1, num_first=0))
    assert [span.number for span in meter.history] == list(range(20, 20 + NUM_SPANS))


def test_the_planner_counts_what_its_requests_say_at_their_end() -> None:
    bench = Bench(num_pages=200, max_running=6)
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 900, 24).astype(np.int32)
    for number in range(20):
        prompt = np.concatenate((shared, rng.integers(0, 900, 3 + number).astype(np.int32)))
        bench.submit(number, prompt, max_tokens=10 + number)
    while bench.plan() or bench.deliver():
        bench.now += 0.01
    meter, metrics = bench.planner.meter, bench.metrics.values()
    assert len(bench.metrics) == 20
    assert meter.num_output_tokens == sum(one.num_output_tokens for one in metrics)
    assert meter.num_prompt_tokens == sum(one.num_prompt_tokens for one in metrics)
    assert meter.num_cached_tokens == sum(one.cached_tokens for one in metrics) > 0
    assert meter.ttft_s.num_seen == meter.queue_s.num_seen == meter.e2e_s.num_seen == 20
    assert meter.ttft_s.total == pytest.approx(sum(one.ttft_s or 0 for one in metrics))
    assert meter.num_ended == {**dict.fromkeys(Finish, 0), **Counter(one.finish for one in metrics)}
    assert meter.e2e_s.total == pytest.approx(sum(one.e2e_s for one in metrics))
    assert meter.e2e_s.total > 0
    assert meter.itl_s.num_seen + 20 == meter.num_output_tokens
    assert meter.num_steps == meter.step_s.num_seen == bench.device.num_steps
    assert (bench.planner.meter.num_retractions, meter.num_retractions) == (0, 0)
