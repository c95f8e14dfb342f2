"""Per-request metrics by the scheduler's clock."""

import numpy as np
import pytest

from engine.messages import Finish, StepDone
from tests.scheduling.bench import Bench, prompt_of

STEP_S = 0.25


def run(bench: Bench) -> None:
    """Every step takes a quarter of a second."""
    while bench.plan():
        bench.now += STEP_S
        bench.deliver()


def test_times_are_from_arrival_to_start_to_first_token_to_end() -> None:
    bench = Bench(depth=1, max_running=1, prefill_chunk=8, max_step_tokens=8)
    bench.submit(1, prompt_of(16), max_tokens=5, ignore_eos=True)
    bench.submit(2, prompt_of(8, seed=2), max_tokens=1, ignore_eos=True)
    run(bench)
    first, second = bench.metrics[1], bench.metrics[2]
    assert (first.queue_s, first.ttft_s, first.e2e_s) == (0, 2 * STEP_S, 6 * STEP_S), "two chunks, then four tokens"
    assert first.tpot_s == pytest.approx(STEP_S)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.finish) == (16, 5, Finish.LENGTH)
    assert (second.queue_s, second.ttft_s, second.tpot_s) == (6 * STEP_S, 7 * STEP_S, None)


def test_cached_tokens_and_retractions_are_counted() -> None:
    bench = Bench(depth=1, num_pages=12, max_len=48)
    bench.expect_short_outputs()
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(6, seed=request_id), max_tokens=30, ignore_eos=True)
    run(bench)
    bench.submit(3, prompt_of(6, seed=1), max_tokens=1)
    run(bench)
    assert (
        bench.metrics[1].num_retractions + bench.metrics[2].num_retractions == bench.planner.meter.num_retractions > 0
    )
    assert bench.metrics[2].ttft_s == STEP_S, "a retraction does not change when the first token came"
    assert (bench.metrics[1].cached_tokens, bench.metrics[3].cached_tokens) in {(0, 4), (0, 0)}


def test_tokens_that_a_prompt_puts_into_the_cache_are_those_of_its_new_pages() -> None:
    bench = Bench(depth=1, max_running=2, page_size=4, prefill_chunk=8, max_step_tokens=16)
    bench.submit(1, prompt_of(18), max_tokens=1)
    run(bench)
    assert (bench.cached[1], bench.created[1]) == (0, 16), "two of its tokens fill no page"
    bench.submit(2, prompt_of(18), max_tokens=1)
    run(bench)
    assert (bench.cached[2], bench.created[2]) == (16, 0)
    before = bench.planner.pages.tree.num_cached
    for request_id in (3, 4):  # both find nothing, and compute the same page in one step
        bench.submit(request_id, prompt_of(6, seed=2), max_tokens=1)
    run(bench)
    assert bench.cached[3] == bench.cached[4] == 0
    assert bench.created[3] + bench.created[4] == 4
    assert bench.planner.pages.tree.num_cached == before + 1


def test_a_request_that_never_ran_has_no_times_but_its_whole() -> None:
    bench = Bench(depth=1, max_running=1)
    bench.submit(1, prompt_of(4), max_tokens=9, ignore_eos=True)
    bench.submit(2, prompt_of(4, seed=2), max_tokens=9, ignore_eos=True)
    bench.step()
    bench.now = 3.0
    bench.planner.abort(2)
    bench.read()
    metrics = bench.metrics[2]
    assert (metrics.finish, metrics.num_output_tokens, metrics.cached_tokens) == (Finish.ABORT, 0, 0)
    assert (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.e2e_s) == (None, None, None, 3.0)
    bench.finish()


def test_a_failed_and_an_aborted_request_are_told_with_what_they_had() -> None:
    bench = Bench(depth=1)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(4, seed=request_id), max_tokens=9, ignore_eos=True)
    bench.step()
    bench.plan()
    done = bench.device.done.popleft()
    tokens = np.frombuffer(done.token_ids, dtype=np.int32).copy()
    tokens[0] = -1
    bench.device.done.append(StepDone(rank=0, step_id=done.step_id, token_ids=tokens.tobytes()))
    bench.deliver()
    bench.planner.abort(2)
    bench.read()
    assert (bench.metrics[1].finish, bench.metrics[1].num_output_tokens) == (Finish.ERROR, 1)
    assert (bench.metrics[2].finish, bench.metrics[2].num_output_tokens) == (Finish.ABORT, 2)
    bench.finish()


def test_a_stop_string_is_a_stop_and_teaches_the_forecast() -> None:
    bench = Bench(depth=1, num_pages=40)
    bench.submit(1, prompt_of(4), max_tokens=100, ignore_eos=True)
    for _ in range(3):
        bench.step()
    bench.planner.abort(1, Finish.STOP)
    bench.read()
    assert (bench.metrics[1].finish, bench.metrics[1].num_output_tokens) == (Finish.STOP, 3)
    assert bench.planner._forecast.remaining(np.zeros(1, np.int32), np.full(1, 100, np.int32))[0] == 3
    bench.finish()
