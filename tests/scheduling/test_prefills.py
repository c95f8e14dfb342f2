"""Who starts and whose prompt goes on: turns, policies, shared work, room for those who run."""

import numpy as np
import pytest

from engine.plugins.policy.fcfs import FirstComeFirstServed
from engine.plugins.policy.lpm import LongestPrefixMatch
from tests.scheduling.bench import Bench, prompt_of, segments


def test_prompts_take_turns() -> None:
    bench = Bench(depth=1, max_step_tokens=16, prefill_chunk=16, num_pages=128)
    for request_id in range(3):
        bench.submit(request_id, prompt_of(48, seed=request_id), max_tokens=1)
    bench.finish()
    assert bench.turns == [0, 0, 1, 0, 1, 2, 1, 2, 2], "the queue takes its turn like the prompts that are under way"


def test_a_short_prompt_passes_long_ones_within_a_round() -> None:
    bench = Bench(depth=1, max_running=8, max_step_tokens=16, prefill_chunk=16, num_pages=512, max_len=300)
    for request_id in range(4):
        bench.submit(request_id, prompt_of(256, seed=request_id), max_tokens=1)
    while len(bench.started) < 4:
        bench.step()
    bench.submit(9, prompt_of(10, seed=9), max_tokens=1, ignore_eos=True)
    for _ in range(5):
        bench.step()
    assert bench.streams[9] == bench.expected[9], "four others and the queue itself take turns"
    bench.finish()
    assert all(bench.streams[request_id] == bench.expected[request_id] for request_id in range(4))


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    bench = Bench(depth=1, max_running=8, max_step_tokens=16, prefill_chunk=16, num_pages=512, max_len=300)
    bench.submit(1000, prompt_of(256, seed=1000), max_tokens=1, ignore_eos=True)
    for request_id in range(60):
        bench.submit(request_id, prompt_of(15, seed=request_id), max_tokens=1)
        bench.step()
    assert bench.streams[1000] == bench.expected[1000], "16 chunks in 60 steps"
    bench.finish()


def test_leftover_budget_is_used_for_newcomers() -> None:
    bench = Bench(depth=1, max_running=16, max_step_tokens=64, prefill_chunk=16, num_pages=128)
    for request_id in range(10):
        bench.submit(request_id, prompt_of(6, seed=request_id), max_tokens=2)
    bench.step()
    assert sum(segments(bench.steps[0]).values()) == 60, "turns are only as long as there is something to share"


def test_longest_prefix_match_runs_what_is_cached_first() -> None:
    bench = Bench(depth=1, max_running=1, page_size=4, num_pages=20, policy=LongestPrefixMatch(64))
    bench.submit(0, prompt_of(24), max_tokens=1)
    bench.finish()
    bench.submit(1, prompt_of(24, seed=1), max_tokens=1)
    bench.submit(2, np.concatenate((prompt_of(24), prompt_of(4, seed=2))), max_tokens=1)
    bench.step()
    assert bench.streams[2]
    assert not bench.streams[1]
    bench.finish()
    assert bench.cached[2] == 24


def test_the_look_ahead_finds_nothing_under_another_salt() -> None:
    """Or the order of answers would tell a tenant what another one has asked."""
    bench = Bench(depth=1, max_running=1, page_size=4, num_pages=40, policy=LongestPrefixMatch(64))
    asked = prompt_of(24)
    for request_id, salt in enumerate(("", "other")):
        bench.submit(request_id, asked, max_tokens=1, salt=salt)
        bench.finish()
    bench.started.clear()
    bench.submit(10, prompt_of(24, seed=1), max_tokens=1, salt="mine")
    bench.submit(11, asked, max_tokens=1, salt="mine")
    bench.finish()
    assert bench.started == [10, 11], "neither has anything cached, so the first comes first"
    assert (bench.cached[10], bench.cached[11]) == (0, 0)


def test_what_another_salt_has_cached_does_not_keep_a_request_from_sharing() -> None:
    """A prompt under way is worth waiting for by what its own salt has of it."""
    bench = Bench(depth=1, page_size=4, num_pages=200, max_len=256)
    shared = prompt_of(128)
    bench.submit(0, shared, max_tokens=1)
    bench.finish()
    for request_id in (1, 2):
        bench.submit(request_id, np.concatenate((shared, prompt_of(8, seed=request_id))), max_tokens=1, salt="mine")
    bench.finish()
    assert (bench.cached[1], bench.cached[2]) == (0, 128)


def test_first_come_first_served_ignores_priority() -> None:
    bench = Bench(depth=1, max_running=1, policy=FirstComeFirstServed())
    bench.submit(1, prompt_of(4), max_tokens=1, priority=5)
    bench.submit(2, prompt_of(4, seed=1), max_tokens=1, priority=-5)
    bench.step()
    assert bench.streams[1]
    assert not bench.streams[2]
    bench.finish()


@pytest.mark.parametrize("policy", [FirstComeFirstServed(), LongestPrefixMatch(2)])
def test_who_does_not_fit_is_waited_for(policy: object) -> None:
    """A big request at the front is not starved by small ones that would still fit."""
    bench = Bench(depth=1, max_running=8, num_pages=16, max_len=64, policy=policy)
    bench.expect_short_outputs()
    bench.submit(0, prompt_of(24, seed=50), max_tokens=10, ignore_eos=True)
    bench.step()
    bench.submit(1, prompt_of(50, seed=51), max_tokens=2, ignore_eos=True)
    for request_id in range(2, 8):
        bench.submit(request_id, prompt_of(4, seed=request_id), max_tokens=8, ignore_eos=True)
    bench.finish()
    overtaken_by = bench.started[: bench.started.index(1)]
    assert overtaken_by == [99, 0]


def test_short_outputs_teach_to_admit_more_at_once() -> None:
    def most_running(history: int) -> int:
        bench = Bench(depth=1, max_running=16, num_pages=40, max_len=128, max_step_tokens=256)
        for request_id in range(100, 110):
            bench.submit(request_id, prompt_of(4, seed=request_id), max_tokens=history, ignore_eos=True)
        bench.finish()
        for request_id in range(10):
            bench.submit(request_id, prompt_of(8, seed=request_id), max_tokens=100, ignore_eos=True)
        bench.step()
        return bench.planner.stats().running

    assert most_running(history=100) == 1, "108 tokens of 160"
    assert most_running(history=4) >= 8


def test_a_forecast_that_was_too_low_costs_retractions_and_no_token() -> None:
    bench = Bench(depth=2, max_running=16, num_pages=40, max_len=128, max_step_tokens=256)
    bench.expect_short_outputs()
    for request_id in range(10):
        bench.submit(request_id, prompt_of(8, seed=request_id), max_tokens=60, ignore_eos=True)
    bench.finish()
    assert 0 < bench.planner.meter.num_retractions < 40, "once or twice each, then it has learnt"
    assert bench.streams == bench.expected


def test_a_request_alone_starts_whatever_the_forecast_says() -> None:
    bench = Bench(depth=1, page_size=16, num_pages=3, max_len=64)
    for request_id in range(2):
        bench.submit(request_id, prompt_of(40, seed=request_id), max_tokens=9, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected


def test_where_nobody_decodes_prompts_get_what_the_budget_leaves() -> None:
    bench = Bench(depth=1, max_step_tokens=64, prefill_chunk=16, num_pages=512, max_len=300)
    bench.submit(1, prompt_of(100, seed=1), max_tokens=8)
    bench.step()
    assert list(segments(bench.steps[-1]).values()) == [64], "alone it has the whole step"
    bench.submit(2, prompt_of(100, seed=2), max_tokens=8)
    bench.step()
    assert sorted(segments(bench.steps[-1]).values()) == [28, 36], "a chunk each, and the first in turn has the rest"
    bench.finish()
    assert all(bench.streams[one] == bench.expected[one] for one in (1, 2))


def test_beside_a_request_that_decodes_a_prompt_has_a_chunk() -> None:
    bench = Bench(depth=1, max_step_tokens=64, prefill_chunk=16, num_pages=512, max_len=300)
    bench.submit(1, prompt_of(4, seed=1), max_tokens=40, ignore_eos=True)
    bench.step()
    bench.submit(2, prompt_of(100, seed=2), max_tokens=1)
    bench.step()
    assert list(segments(bench.steps[-1]).values()) == [16]
    bench.finish()


def test_log_probabilities_of_a_prompt_are_never_more_than_a_chunk_of_them() -> None:
    bench = Bench(depth=1, max_step_tokens=64, prefill_chunk=64, num_pages=512, max_len=300, scored_chunk=16)
    bench.submit(1, prompt_of(100, seed=1), max_tokens=1, prompt_logprobs=1)
    bench.step()
    assert list(segments(bench.steps[-1]).values()) == [16]
