"""Predictions: a trace of an engine whose step times are known says what that engine does with other settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.features.traffic.sizes import StepSize
from engine.features.traffic.trace import Trace, TracedStep
from server.extensions.whatif.changes import as_recorded, changed
from server.extensions.whatif.costs import StepCosts, nonnegative
from server.extensions.whatif.figures import doubts, predicted, recorded
from server.extensions.whatif.replay import Replayed, TraceReplay, stand_ins
from tests.features.traffic.recorded import NUM_PAGES, record, requests

pytestmark = pytest.mark.slow

WITHIN = 0.02
FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "e2e_p99_ms", "hit_rate", "output_tokens_per_s")
MADE = requests(250, 90.0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of more requests than 32 rows can do."""
    return record(tmp_path_factory.mktemp("trace"), MADE)[0]


def replayed(trace: Trace, *changes: str, concurrency: int = 0) -> Replayed:
    case = changed(trace.head, changes) if changes else as_recorded(trace.head)
    tokens = stand_ins(trace.requests, trace.head)
    return TraceReplay(case, trace.requests, tokens, StepCosts(trace.steps).seconds, concurrency).run()


def figures(trace: Trace, *changes: str) -> dict[str, float]:
    return predicted("", "", replayed(trace, *changes), StepCosts(trace.steps)).figures


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ((), {}),
        (("kv.num_pages=400",), {"num_pages": 400}),
        (("scheduler.max_running=10",), {"max_running": 10}),
        (
            ("scheduler.max_step_tokens=128", "scheduler.prefill_chunk=32"),
            {"max_step_tokens": 128, "prefill_chunk": 32},
        ),
        (("plugins.policy=fair",), {"policy": "fair"}),
        (("plugins.policy=lpm", "kv.num_pages=500"), {"policy": "lpm", "num_pages": 500}),
    ],
    ids=lambda one: "" if isinstance(one, dict) else " ".join(one) or "as it was",
)
def test_a_prediction_is_what_the_engine_does(
    trace: Trace, tmp_path: Path, changes: tuple[str, ...], limits: dict[str, Any]
) -> None:
    real = recorded(record(tmp_path, MADE, **limits)[0]).figures
    found = figures(trace, *changes)
    assert {name: found[name] for name in FIGURES} == pytest.approx({name: real[name] for name in FIGURES}, rel=WITHIN)
    assert found["retractions"] == pytest.approx(real["retractions"], abs=2)
    if changes:
        before = recorded(trace).figures
        moved = [name for name in FIGURES if abs(real[name] - before[name]) > 3 * WITHIN * before[name]]
        assert moved, "a change that changes nothing would be predicted by anything"


def test_conversations_find_their_earlier_turns_in_the_cache(tmp_path: Path) -> None:
    """A turn's prompt has the output of the turn before: that too is told by blocks, and by nothing else."""
    first = requests(1, 1.0)[0]
    first = replace(first, output=1 << 20, max_tokens=64)
    said = np.full(64, 7, dtype=np.int32)  # what a ``Simulation`` samples
    second = replace(first, at=first.at + 20.0, prompt=np.concatenate((first.prompt, said, said[:20])))
    trace, engine = record(tmp_path, [first, second])
    cached = engine.finished[1].cached_tokens
    assert cached >= len(first.prompt) + 63 - 16
    assert [one.cached_tokens for one in replayed(trace).ended] == [0, cached]


def test_a_closed_loop_sends_the_next_request_when_one_has_ended(trace: Trace) -> None:
    ended = replayed(trace, concurrency=4).ended
    assert len(ended) == len(MADE)
    times = sorted([(one.arrived_at, 1) for one in ended] + [(one.arrived_at + one.e2e_s, -1) for one in ended])
    assert set(np.cumsum([change for _, change in times]).tolist()) <= {0, 1, 2, 3, 4}
    ends = sorted(one.arrived_at + one.e2e_s for one in ended)
    arrivals = sorted(one.arrived_at for one in ended)[4:]
    assert arrivals == pytest.approx(ends[: len(arrivals)])


def test_what_limits_refuse_and_time_out_is_counted(trace: Trace) -> None:
    some = replayed(trace, "limits.max_requests=20")
    assert some.refused["limits.max_requests"] + len(some.ended) == len(MADE)
    assert 0 < some.refused["limits.max_requests"] < len(MADE)
    assert replayed(trace, "limits.max_queued_tokens=3000").refused["limits.max_queued_tokens"] > 0
    assert replayed(trace, "limits.max_requests_per_client=2").refused["limits.max_requests_per_client"] > 0
    patient = figures(trace)
    first = replayed(trace, "limits.first_token_timeout_s=1")
    assert len(first.ended) == len(MADE)
    left = [one for one in first.ended if one.ttft_s is None]
    assert {round(one.e2e_s, 9) for one in left} == {1.0}
    assert 0 < len(left) < len(MADE)
    assert max(one.ttft_s for one in first.ended if one.ttft_s is not None) <= 1.0 < patient["ttft_p99_ms"] / 1000
    whole = replayed(trace, "limits.request_timeout_s=2")
    assert max(one.e2e_s for one in whole.ended) == pytest.approx(2.0)


def test_requests_that_never_fit_are_refused_as_the_server_refuses_them(trace: Trace) -> None:
    small = replayed(trace, "kv.num_pages=24")
    assert small.refused["context_length_exceeded"] + len(small.ended) == len(MADE)
    assert small.refused["context_length_exceeded"] > 0


def test_pages_of_the_same_memory_are_as_many_fewer_as_they_are_larger(trace: Trace) -> None:
    assert changed(trace.head, ["kv.page_size=64"]).limits.num_pages == NUM_PAGES // 4
    assert figures(trace, "kv.page_size=64")["hit_rate"] < figures(trace)["hit_rate"]


def test_who_left_without_a_token_leaves_again(trace: Trace) -> None:
    one = msgspec.structs.replace(trace.requests[-1], finish="abort", output=0, ttft_s=None, tpot_s=None, e2e_s=0.001)
    blocks = one.blocks[: one.prompt // 16 * 6]
    ended = replayed(replace(trace, requests=[*trace.requests[:-1], msgspec.structs.replace(one, blocks=blocks)])).ended
    last = max(ended, key=lambda one: one.arrived_at)
    assert (last.num_output_tokens, last.e2e_s) == (0, pytest.approx(0.001))


# ---- step costs ----------------------------------------------------------------------------------


def steps(count: int, cost: Any, seed: int = 0) -> list[TracedStep]:
    """Of all sizes, with durations by ``cost``, +- 5 %."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        decodes, prefill = int(rng.integers(0, 64)), int(rng.integers(1, 512)) * int(rng.random() < 0.3)
        context = decodes * int(rng.integers(50, 900))
        size = StepSize(decodes, context, int(prefill > 0), prefill, prefill * prefill // 2, 0)
        made.append(TracedStep(float(number), cost(size) * float(rng.lognormal(0, 0.05)), *size))
    return made


def linear(size: StepSize) -> float:
    return 4e-3 + 5e-5 * size.decodes + 2e-7 * size.context + 6e-5 * size.prefill_tokens


def roofline(size: StepSize) -> float:
    return max(8e-3 + 1e-7 * size.context, 6e-5 * (size.decodes + size.prefill_tokens)) + 5e-5 * size.decodes


@pytest.mark.parametrize(("cost", "within"), [(linear, 0.02), (roofline, 0.12)])
def test_costs_are_learnt_from_steps_and_hold_for_others(cost: Any, within: float) -> None:
    costs = StepCosts(steps(3000, cost))
    errors = [abs(costs.seconds(one.size) / cost(one.size) - 1) for one in steps(300, cost, seed=1)]
    assert np.median(errors) < within / 2
    assert np.percentile(errors, 95) < within * 1.5
    assert costs.fit.r2 > 0.95
    assert costs.fit.total_error == pytest.approx(0.0, abs=1e-9)


def test_steps_that_were_held_up_count_for_the_sum_and_not_for_the_shape() -> None:
    rng = np.random.default_rng(3)
    made = steps(3000, linear)
    held_up = [
        msgspec.structs.replace(one, seconds=one.seconds + 0.2 * (one.decodes > 32 and rng.random() < 0.02))
        for one in made
    ]
    costs = StepCosts(held_up)
    alone = StepSize(8, 4000, 0, 0, 0, 0)
    assert costs.seconds(alone) == pytest.approx(linear(alone), rel=0.1)
    total = sum(costs.seconds(one.size) for one in held_up)
    assert total == pytest.approx(sum(one.seconds for one in held_up), rel=1e-6)


def test_least_squares_have_no_negative_part_and_no_better_neighbour() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        a, b = rng.normal(size=(30, 6)), rng.normal(size=30)
        a[:, 5] = a[:, 4] * 2  # two that say the same
        x = nonnegative(a, b)
        assert (x >= 0).all()
        gradient = a.T @ (a @ x - b)
        assert (gradient > -1e-6).all(), "growing a part would fit better"
        assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6, "a part would fit better as another number"


def test_what_was_never_measured_is_said(trace: Trace) -> None:
    costs = StepCosts(trace.steps)
    column = predicted("", "", replayed(trace, "scheduler.max_running=64"), costs)
    assert any("decodes" in one for one in column.warnings)
    assert not predicted("", "", replayed(trace), costs).warnings
    assert not [*doubts({"ttft_p50_ms": 100.0}, {"ttft_p50_ms": 110.0})]
    (said,) = doubts({"ttft_p50_ms": 100.0}, {"ttft_p50_ms": 120.0})
    assert "120.0 instead of 100.0" in said
