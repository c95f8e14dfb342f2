"""Evicted pages go to the host and come back: planner and tree against a device that stores what it is told."""

import numpy as np
import pytest

from engine.features.host_tier.messages import transfers_of
from tests.scheduling.bench import Bench, prompt_of


def serve_in_turn(bench: Bench, prompts: list[np.ndarray], first_id: int) -> int:
    """One after the other; returns how many of their tokens needed no computing."""
    for request_id, prompt in enumerate(prompts, first_id):
        bench.submit(request_id, prompt, max_tokens=4, ignore_eos=True)
        bench.finish()
    return sum(bench.cached[request_id] for request_id in range(first_id, first_id + len(prompts)))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_working_set_larger_than_the_pool_is_found_on_the_host(page_size: int) -> None:
    prompts = [prompt_of(32, seed=seed) for seed in range(8)]
    cached = {}
    for num_host_pages in (0, 400 // page_size):
        bench = Bench(page_size=page_size, num_pages=80 // page_size, max_len=64, num_host_pages=num_host_pages)
        serve_in_turn(bench, prompts, first_id=0)
        cached[num_host_pages] = serve_in_turn(bench, prompts, first_id=100)
        assert bench.streams == bench.expected
    assert cached[0] == 0, "in a circle, least recently used is always gone when it is wanted"
    assert cached[400 // page_size] == 8 * (31 // page_size * page_size)


def test_the_oldest_copies_on_the_host_make_room() -> None:
    """Three prompts of five whole pages fit the pool beside a page to compute with, and four the host."""
    bench = Bench(page_size=4, num_pages=16, max_len=48, num_host_pages=20)
    prompts = [prompt_of(22, seed=seed) for seed in range(6)]
    moved = []
    for request_id, number in enumerate((0, 1, 2, 3, 4, 0, 1, 2, 0, 5)):
        before = bench.device.num_moved_to_host
        bench.submit(request_id, prompts[number], max_tokens=1, ignore_eos=True)
        bench.finish()
        moved.append(bench.device.num_moved_to_host - before)
    assert bench.streams == bench.expected
    assert bench.device.num_moved_back == 15
    # When 2 comes back and 4 must go, 4 takes the place of 0's copy, the oldest.  So in the end 1, which was used
    # longest ago and leaves for 5, has its copy still.
    assert moved == [0, 0, 0, 5, 5, 5, 5, 5, 0, 0]


def test_what_comes_back_is_copied_before_anything_else_of_the_step() -> None:
    bench = Bench(depth=2, page_size=4, num_pages=12, max_len=48, num_host_pages=40)
    prompts = [prompt_of(24, seed=seed) for seed in range(4)]
    for round_id in range(3):
        for number, prompt in enumerate(prompts):
            bench.submit(10 * round_id + number, prompt, max_tokens=9, ignore_eos=True)
        bench.finish()
    assert bench.streams == bench.expected
    directions = np.concatenate([np.frombuffer(transfers_of(step).to_host, dtype=np.int32) for step in bench.steps])
    assert set(directions.tolist()) == {0, 1}


def test_without_a_host_tier_nothing_is_transferred() -> None:
    bench = Bench(page_size=4, num_pages=12, max_len=48)
    serve_in_turn(bench, [prompt_of(24, seed=seed) for seed in range(4)], first_id=0)
    assert not any(step.parts for step in bench.steps)


def test_a_host_tier_of_a_few_pages_keeps_what_fits() -> None:
    bench = Bench(page_size=4, num_pages=12, max_len=48, num_host_pages=3)
    prompts = [prompt_of(24, seed=seed) for seed in range(4)]
    serve_in_turn(bench, prompts, first_id=0)
    serve_in_turn(bench, prompts[::-1], first_id=100)
    assert bench.streams == bench.expected
