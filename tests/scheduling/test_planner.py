"""The planner against a device that notices every stale page: continuous batching, chunks, retraction, overlap."""

from collections import Counter

import numpy as np
import pytest

from engine.kv.eviction import EvictionStrategy
from engine.messages import Admit, Finish, StepDone, Tokens
from engine.plugins.eviction.fifo import FirstInFirstOut
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.plugins.policy.fcfs import FirstComeFirstServed
from engine.plugins.policy.lpm import LongestPrefixMatch
from engine.plugins.policy.priority import MostUrgentFirst
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from tests.scheduling.bench import Bench, prompt_of
from tests.scheduling.fake_device import expected_output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 40])
def test_one_request_gives_the_oracles_tokens(depth: int, page_size: int, length: int) -> None:
    bench = Bench(depth=depth, page_size=page_size, num_pages=128 // page_size)
    bench.submit(1, prompt_of(length), max_tokens=9, ignore_eos=True)
    bench.finish()
    assert bench.streams[1] == bench.expected[1]
    assert bench.ends[1] == [Finish.LENGTH]


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_on_beside_it() -> None:
    bench = Bench(prefill_chunk=8, depth=1)
    bench.submit(1, prompt_of(4), max_tokens=20, ignore_eos=True)
    bench.plan(), bench.deliver()
    bench.submit(2, prompt_of(40, seed=1), max_tokens=4, ignore_eos=True)
    before = len(bench.streams[1])
    for _ in range(5):
        bench.plan(), bench.deliver()
    assert len(bench.streams[1]) == before + 5, "the running request got a token in each step of the other's prefill"
    assert len(bench.streams[2]) == 1, "40 tokens in chunks of 8 take five steps"
    bench.finish()
    assert bench.streams == bench.expected


def test_the_token_budget_of_a_step_is_shared() -> None:
    bench = Bench(max_step_tokens=10, prefill_chunk=8, depth=1)
    for request_id in range(3):
        bench.submit(request_id, prompt_of(8, seed=request_id), max_tokens=2)
    step = bench.planner.next_step()
    assert step is not None
    assert np.frombuffer(step.prefill_lengths, dtype=np.int32).tolist() == [8, 2]


def test_a_late_eos_costs_no_visible_token() -> None:
    for depth in (1, 2):
        bench = Bench(depth=depth)
        stop = expected_output(prompt_of(5), 6)[5]
        bench.submit(1, prompt_of(5), max_tokens=50, stop_token_ids=(stop,))
        bench.finish()
        assert bench.streams[1] == bench.expected[1]
        assert bench.ends[1] == [Finish.STOP]


def test_more_stop_ids_than_a_row_has_columns_for_all_work() -> None:
    stop = expected_output(prompt_of(5), 4)[3]
    bench = Bench()
    bench.submit(1, prompt_of(5), max_tokens=50, stop_token_ids=(*range(990, 1000), stop))
    bench.finish()
    assert bench.streams[1] == bench.expected[1]


@pytest.mark.parametrize("when", ["waiting", "prefilling", "in flight", "after the end"])
def test_an_abort_is_right_in_every_state_and_returns_every_page(when: str) -> None:
    bench = Bench(depth=2, max_running=1, prefill_chunk=8)
    bench.submit(1, prompt_of(20), max_tokens=6, ignore_eos=True)
    if when == "waiting":
        bench.submit(2, prompt_of(5, seed=2), max_tokens=6)
        bench.plan()
        bench.planner.abort(2)
        bench.read()
        assert bench.ends[2] == [Finish.ABORT]
    else:
        for _ in range(2 if when == "prefilling" else 5):
            bench.plan() or bench.deliver()
        if when == "after the end":
            bench.finish()
        bench.planner.abort(1)
        bench.planner.abort(1)
        bench.read()
        assert len(bench.ends[1]) == 1
    bench.finish()


def test_a_row_is_reused_only_after_the_last_step_that_used_it() -> None:
    bench = Bench(depth=2, max_running=1)
    stop = expected_output(prompt_of(5), 3)[2]
    bench.submit(1, prompt_of(5), max_tokens=50, stop_token_ids=(stop,))
    bench.submit(2, prompt_of(6, seed=5), max_tokens=5, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected


def test_when_pages_run_out_the_youngest_is_retracted_and_resumes_without_a_gap() -> None:
    bench = Bench(depth=2, num_pages=12, page_size=4, max_len=48)
    bench.expect_short_outputs()
    for request_id in range(3):
        bench.submit(request_id, prompt_of(6, seed=request_id), max_tokens=30, ignore_eos=True)
    bench.finish()
    assert bench.planner.meter.num_retractions > 0, "nothing scarce happened"
    assert bench.streams == bench.expected


def test_priority_decides_who_runs_first() -> None:
    bench = Bench(depth=1, max_running=1)
    for request_id, priority in ((1, 5), (2, 0)):
        prompt = prompt_of(4, seed=request_id)
        bench.planner.admit(
            Admit(
                request_id=request_id,
                token_ids=prompt.tobytes(),
                params=SamplingParams(max_tokens=1),
                priority=priority,
            )
        )
        bench.streams[request_id], bench.ends[request_id] = [], []
    bench.plan(), bench.deliver()
    assert (len(bench.streams[1]), len(bench.streams[2])) == (0, 1)


def test_a_row_whose_logits_were_not_finite_ends_alone() -> None:
    bench = Bench(depth=1)
    bench.submit(1, prompt_of(5), max_tokens=5, ignore_eos=True)
    bench.submit(2, prompt_of(5, seed=2), max_tokens=5, ignore_eos=True)
    bench.plan()
    done = bench.device.done.popleft()
    tokens = np.frombuffer(done.token_ids, dtype=np.int32).copy()
    tokens[0] = -1
    bench.device.done.append(StepDone(rank=0, step_id=done.step_id, token_ids=tokens.tobytes()))
    bench.deliver()
    assert bench.ends == {1: [Finish.ERROR], 2: []}
    bench.finish()
    assert bench.streams[2] == bench.expected[2]


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [
        (0, 5, "prompt"),
        (64, 1, "prompt"),
        (100, 1, "prompt"),
        (60, 5, "prompt"),
        (40, 10, "max_tokens"),
        (49, None, "prompt"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(length: int, max_tokens: int | None, param: str) -> None:
    bench = Bench(page_size=16, num_pages=3, max_len=64)
    with pytest.raises(RequestError) as refused:
        bench.submit(1, prompt_of(length), max_tokens=max_tokens)
    assert (refused.value.status, refused.value.param) == (400, param)
    bench.finish()


def test_the_largest_request_that_fits_is_served() -> None:
    bench = Bench(page_size=16, num_pages=3, max_len=64)
    bench.submit(1, prompt_of(40), max_tokens=9, ignore_eos=True)
    bench.submit(2, prompt_of(48, seed=2), max_tokens=None, ignore_eos=True)
    bench.expected[2] = bench.expected[2][:1]
    bench.finish()
    assert bench.streams == bench.expected


def test_a_second_request_with_the_same_prompt_computes_only_its_end() -> None:
    bench = Bench(page_size=4)
    bench.submit(1, prompt_of(18), max_tokens=3, ignore_eos=True)
    bench.finish()
    bench.submit(2, prompt_of(18), max_tokens=3, ignore_eos=True)
    bench.finish()
    assert bench.cached == {1: 0, 2: 16}
    assert bench.streams == bench.expected


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_fully_cached_prompt_still_computes_its_last_token(length: int) -> None:
    bench = Bench(page_size=4)
    for request_id in range(3):
        bench.submit(request_id, prompt_of(length), max_tokens=6, ignore_eos=True)
        bench.finish()
    assert bench.cached[2] == (length - 1) // 4 * 4
    assert bench.streams == bench.expected


def test_the_output_of_one_turn_is_cached_for_the_next() -> None:
    bench = Bench(page_size=4)
    bench.submit(1, prompt_of(10), max_tokens=11, ignore_eos=True)
    bench.finish()
    turn = np.concatenate((prompt_of(10), bench.streams[1], prompt_of(5, seed=9)))
    bench.submit(2, turn, max_tokens=4, ignore_eos=True)
    bench.finish()
    assert bench.cached[2] == 20, "10 + 11 tokens, the last one never computed, in whole pages"
    assert bench.streams == bench.expected


@pytest.mark.parametrize("depth", [1, 2])
def test_two_identical_prompts_in_one_step_are_both_right_and_end_up_sharing(depth: int) -> None:
    """The second of them goes on with the first's pages, and its own are freed: the row must be rewritten."""
    bench = Bench(depth=depth, page_size=4, num_pages=16)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(13), max_tokens=12, ignore_eos=True)
    bench.plan()
    assert bench.device.num_steps == 1
    bench.deliver()
    assert bench.planner.stats().pages_used <= 3 + 2 * 2, "three pages of the prompt are held once"
    # Whoever reads a freed page now reads this one's tokens.
    bench.submit(3, prompt_of(20, seed=3), max_tokens=8, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected


def test_requests_that_share_a_long_prefix_wait_for_the_first_to_compute_it() -> None:
    bench = Bench(page_size=4, prefill_chunk=64, max_step_tokens=200, max_running=8)
    stem = prompt_of(48)
    for request_id in range(6):
        bench.submit(request_id, np.concatenate((stem, prompt_of(5, seed=request_id))), max_tokens=4, ignore_eos=True)
    bench.finish()
    assert bench.cached == {0: 0, **dict.fromkeys(range(1, 6), 48)}
    assert bench.streams == bench.expected


def test_a_request_that_waits_for_a_prefix_goes_ahead_when_that_one_is_aborted() -> None:
    bench = Bench(page_size=4, prefill_chunk=16)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(48), max_tokens=4, ignore_eos=True)
    bench.plan()
    bench.planner.abort(1)
    bench.finish()
    assert bench.streams[2] == bench.expected[2]


def test_another_salt_shares_nothing() -> None:
    bench = Bench(page_size=4)
    for request_id, salt in enumerate(["", "a", "b", "a"]):
        bench.submit(request_id, prompt_of(18), salt=salt, max_tokens=3, ignore_eos=True)
        bench.finish()
    assert bench.cached == {0: 0, 1: 0, 2: 0, 3: 16}


def test_a_retracted_request_resumes_from_its_own_cached_pages() -> None:
    bench = Bench(depth=1, page_size=4, num_pages=12, max_len=48)
    bench.expect_short_outputs()
    bench.submit(1, prompt_of(6), max_tokens=30, ignore_eos=True)
    bench.submit(2, prompt_of(6, seed=1), max_tokens=30, ignore_eos=True)
    bench.finish()
    assert bench.planner.meter.num_retractions > 0
    assert bench.cached == {1: 0, 2: 0}, "tokens of its own that a request finds again are no hits"
    assert bench.streams == bench.expected


def test_pages_of_a_failed_row_are_not_cached() -> None:
    bench = Bench(depth=1, page_size=4)
    bench.submit(1, prompt_of(16), max_tokens=5, ignore_eos=True)
    bench.plan()
    done = bench.device.done.popleft()
    bench.device.done.append(StepDone(rank=0, step_id=done.step_id, token_ids=np.array([-1], dtype=np.int32).tobytes()))
    bench.deliver()
    assert bench.planner.stats().pages_cached == 0


POLICIES = (MostUrgentFirst(), FirstComeFirstServed(), LongestPrefixMatch(4))


def random_traffic(seed: int, strategy: EvictionStrategy) -> Counter[str]:
    """One random run; returns how often what happened."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 4, 16]))
    bench = Bench(
        depth=int(rng.integers(1, 4)),
        max_running=int(rng.integers(1, 7)),
        max_step_tokens=int(rng.integers(8, 40)),
        prefill_chunk=int(rng.integers(1, 20)),
        page_size=page_size,
        num_pages=max(3, 80 // page_size),
        max_len=64,
        strategy=strategy,
        policy=POLICIES[int(rng.integers(len(POLICIES)))],
        num_host_pages=int(rng.choice([0, 0, 4, 40])),
    )
    if rng.random() < 0.7:
        bench.expect_short_outputs()
    stems = [prompt_of(int(rng.integers(1, 30)), seed=seed * 10 + stem) for stem in range(2)]
    aborted: set[int] = set()
    counts: Counter[str] = Counter()
    for request_id in range(14):
        own = prompt_of(int(rng.integers(1, 20)), seed=seed * 100 + request_id)
        shape = rng.integers(3)
        prompt = own if shape == 0 else np.concatenate((stems[shape - 1], own[: int(rng.integers(0, len(own)))]))
        most = min(63, bench.num_pages * page_size) - len(prompt)
        if most > 0:
            salt = str(rng.choice(["", "", "", "tenant"]))
            max_tokens = int(rng.integers(1, most + 1))
            bench.submit(request_id, prompt, salt=salt, priority=int(rng.integers(2)), max_tokens=max_tokens)
        for _ in range(int(rng.integers(0, 8))):
            (bench.plan if rng.random() < 0.5 else bench.deliver)()
        live = [other for other in bench.streams if not bench.ends[other]]
        if live and rng.random() < 0.15:
            victim = int(rng.choice(live))
            counts["aborts in flight"] += bench.planner.num_in_flight > 0
            bench.planner.abort(victim)
            bench.planner.check()
            bench.read()
            aborted.add(victim)
    bench.finish()
    counts["retractions"] += bench.planner.meter.num_retractions
    counts["moved to host"] += bench.device.num_moved_to_host
    counts["hits"] += sum(cached > 0 for cached in bench.cached.values())
    for request_id, stream in bench.streams.items():
        expected = bench.expected[request_id]
        assert stream == (expected[: len(stream)] if request_id in aborted else expected), f"seed {seed}"
    return counts


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 80), marks=pytest.mark.slow)], ids=len)
def test_random_traffic_under_pressure_gives_the_oracles_tokens(seeds: range) -> None:
    """Arrivals, shared stems, salts, aborts, tiny pools, both depths; every page accounted for after every event."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += random_traffic(seed, LeastRecentlyUsed() if seed % 2 else FirstInFirstOut())
    assert min(counts.values()) > len(seeds) // 4, counts


def test_the_tokens_message_has_one_line_per_token() -> None:
    bench = Bench(depth=1)
    bench.submit(1, prompt_of(5), max_tokens=2, ignore_eos=True)
    bench.plan()
    bench.planner.complete(bench.device.done.popleft())
    (message,) = bench.planner.outbox
    assert isinstance(message, Tokens)
    assert len(message.request_ids) == 8
    assert len(message.token_ids) == 4
    assert message.finishes == bytes([Finish.RUNNING])
