"""A device that dies takes every page with it and no token: streams go on where they were, whatever was under way."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Finish
from engine.plugins.policy.lpm import LongestPrefixMatch
from engine.types.errors import RequestError
from tests.kv.inserting import insert
from tests.scheduling.bench import EOS, Bench, lose_the_device, prompt_of
from tests.scheduling.fake_device import expected_output

PAGE = 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", range(12))
def test_a_stream_goes_on_wherever_the_device_dies(depth: int, at: int) -> None:
    bench = Bench(depth=depth, prefill_chunk=8)
    bench.submit(1, prompt_of(20), max_tokens=6, ignore_eos=True)
    bench.submit(2, prompt_of(5, seed=2), max_tokens=9, ignore_eos=True)
    for event in range(at):
        bench.plan() if event % 2 == 0 else bench.deliver()
    before = {request: list(stream) for request, stream in bench.streams.items()}
    lose_the_device(bench)
    assert bench.planner.num_in_flight == 0
    bench.finish()
    assert bench.streams == bench.expected
    assert all(bench.streams[request][: len(stream)] == stream for request, stream in before.items())


def test_what_was_cached_is_computed_again() -> None:
    bench = Bench()
    bench.submit(1, prompt_of(24), max_tokens=2, ignore_eos=True)
    bench.finish()
    bench.submit(2, prompt_of(24), max_tokens=2, ignore_eos=True)
    bench.finish()
    assert bench.cached[2] == 20
    lose_the_device(bench)
    bench.submit(3, prompt_of(24), max_tokens=2, ignore_eos=True)
    bench.finish()
    assert bench.cached[3] == 0
    assert bench.streams == bench.expected


def test_who_stood_aside_for_a_prefix_under_way_starts_after_the_loss() -> None:
    bench = Bench(prefill_chunk=8, max_step_tokens=16, depth=1)
    stem = prompt_of(60)
    bench.submit(1, stem, max_tokens=2, ignore_eos=True)
    bench.plan()
    for request in (2, 3):
        bench.submit(request, np.append(stem, request), max_tokens=2, ignore_eos=True)
    bench.deliver(), bench.plan()
    assert bench.started == [1], "the others stand aside"
    lose_the_device(bench)
    bench.finish()
    assert bench.streams == bench.expected


def test_who_had_ended_with_steps_in_flight_stays_ended() -> None:
    bench = Bench(depth=2)
    bench.submit(1, prompt_of(5), max_tokens=30, ignore_eos=True)
    bench.submit(2, prompt_of(6, seed=1), max_tokens=30, ignore_eos=True)
    bench.plan(), bench.plan()
    bench.planner.abort(1)
    bench.read()
    lose_the_device(bench)
    bench.finish()
    assert bench.ends == {1: [Finish.ABORT], 2: [Finish.LENGTH]}
    assert bench.streams[2] == bench.expected[2]


def test_observers_hear_that_every_cached_page_is_gone() -> None:
    bench = Bench(num_pages=16, num_host_pages=8, record_events=True)
    for request in range(8):
        bench.submit(request, prompt_of(20, seed=request), max_tokens=2, ignore_eos=True)
        bench.finish()
    held: dict[str, set[bytes]] = {"device": set(), "host": set()}

    def follow() -> None:
        for event in bench.planner.pages.tree.drain_events():
            for page in event.hashes:
                held[event.tier].remove(page) if event.kind == "removed" else held[event.tier].add(page)

    follow()
    assert held["device"]
    assert held["host"], "pages were moved to the host"
    lose_the_device(bench)
    follow()
    assert held == {"device": set(), "host": set()}
    bench.submit(9, prompt_of(20, seed=0), max_tokens=2, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected


EVENTS = st.lists(
    st.one_of(
        st.sampled_from(["plan", "plan", "deliver", "deliver", "lose"]),
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 3)),  # a prompt, its output, its stem
        st.integers(0, 12),  # an abort
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, depth=st.integers(1, 2), num_pages=st.integers(14, 40), host=st.booleans(), lpm=st.booleans())
def test_any_loss_at_any_time_costs_no_token(
    events: Iterable[object], depth: int, num_pages: int, host: bool, lpm: bool
) -> None:
    bench = Bench(
        depth=depth,
        num_pages=num_pages,
        max_len=56,
        prefill_chunk=8,
        max_step_tokens=24,
        num_host_pages=8 if host else 0,
        policy=LongestPrefixMatch(8) if lpm else None,
    )
    aborted: set[int] = set()
    for event in events:
        match event:
            case "plan":
                bench.plan()
            case "deliver":
                bench.deliver()
            case "lose":
                lose_the_device(bench)
            case (length, max_tokens, stem):
                request = len(bench.streams)
                prompt = np.concatenate((prompt_of(12, seed=stem)[:length], prompt_of(length, seed=50 + request)))
                bench.submit(request, prompt[: 34 - stem], max_tokens=max_tokens)
            case int(request):
                if bench.ends.get(request) == []:
                    aborted.add(request)
                bench.planner.abort(request)
                bench.read()
    bench.finish()
    for request, stream in bench.streams.items():
        expected = bench.expected[request]
        if request in aborted:
            assert stream == expected[: len(stream)]
        else:
            assert stream == expected
            ended_early = len(stream) and stream[-1] == EOS
            assert bench.ends[request] == [Finish.STOP if ended_early else Finish.LENGTH]


def test_the_oracle_would_notice_a_page_kept_over_the_loss() -> None:
    bench = Bench()
    bench.submit(1, prompt_of(24), max_tokens=2, ignore_eos=True)
    bench.finish()
    kept = bench.planner.pages.tree
    lose_the_device(bench)
    poisoned = expected_output(prompt_of(24), 2)
    assert kept.num_cached == 0
    # As if the tree had survived: its pages would be read from a device that has never seen them.
    tree_key = kept.key(prompt_of(24)[:20])
    insert(kept, tree_key, bench.planner.pages.allocator.allocate(5))
    bench.submit(2, prompt_of(24), max_tokens=2, ignore_eos=True)
    while bench.plan() or bench.deliver():
        pass
    assert bench.streams[2] != poisoned


@pytest.mark.parametrize("count", [1, 5, 8])
def test_output_of_another_engine_goes_on_where_it_was(count: int) -> None:
    prompt, bench = prompt_of(20), Bench(prefill_chunk=8)
    whole = expected_output(prompt, 9)
    tokens = np.append(prompt, whole[:count]).astype(np.int32)
    bench.submit(1, tokens, max_tokens=9, ignore_eos=True, num_resumed=count)
    bench.finish()
    assert bench.streams[1] == whole[count:]
    assert bench.ends[1] == [Finish.LENGTH]


def test_output_that_is_complete_has_nothing_to_go_on_with() -> None:
    bench = Bench()
    with pytest.raises(RequestError, match="may get at most"):
        bench.submit(1, prompt_of(20), max_tokens=5, num_resumed=5)
