"""Prompts with one prefix wait for the one that computes it."""

import numpy as np
import pytest

from tests.scheduling.bench import Bench, prompt_of, segments


def test_however_many_arrive_with_one_prefix_it_is_computed_once() -> None:
    bench = Bench(depth=2, max_running=64, max_step_tokens=512, prefill_chunk=32, num_pages=600, max_len=256)
    stem = prompt_of(128, seed=77)
    for request_id in range(60):
        bench.submit(request_id, np.concatenate((stem, prompt_of(3, seed=request_id))), max_tokens=2, ignore_eos=True)
    bench.step()
    assert bench.planner.stats().waiting == 59
    bench.finish()
    assert bench.streams == bench.expected
    computed = sum(sum(segments(step).values()) for step in bench.steps)
    assert computed <= 128 + 60 * 3 + 2 * 4, "the common prefix once, and the end of each prompt"


def test_who_shares_only_the_beginning_of_a_long_prompt_does_not_wait_for_its_end() -> None:
    bench = Bench(depth=1, max_step_tokens=16, prefill_chunk=16, num_pages=200, max_len=300)
    long = prompt_of(256)
    bench.submit(1, long, max_tokens=1)
    bench.submit(2, np.concatenate((long[:64], prompt_of(3, seed=2))), max_tokens=1, ignore_eos=True)
    for _ in range(7):
        bench.step()
    assert bench.streams[2] == bench.expected[2]
    assert bench.cached[2] == 64
    assert not bench.streams[1]
    bench.finish()


@pytest.mark.parametrize("leaves", ["the request that computes", "a request that waits"])
def test_standing_aside_ends_when_either_leaves(leaves: str) -> None:
    bench = Bench(depth=1, prefill_chunk=16, num_pages=64, max_len=128)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(80), max_tokens=3, ignore_eos=True)
    bench.step()
    assert bench.planner.stats().waiting == 1
    gone = 1 if leaves == "the request that computes" else 2
    bench.planner.abort(gone)
    bench.read()
    assert bench.planner.stats().waiting == (1 if gone == 1 else 0)
    bench.finish()
    assert bench.streams[3 - gone] == bench.expected[3 - gone]
