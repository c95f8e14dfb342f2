"""Prompts whose pages are in the store: which wait for them, how long, and what happens to the pages that arrive."""

import numpy as np
import pytest

from engine.features.kv_store.messages import FetchPages, Landing, PagesFetched, moves_of
from engine.features.kv_store.planner import MOST_WAITING
from tests.scheduling.bench import Bench, lose_the_device, prompt_of

PAGES = {"page_size": 4, "num_pages": 24, "max_len": 96}


class Stored(Bench):
    """A bench whose device has a store; fetches are answered when a test says so."""

    def __init__(self, *, num_ranks: int = 1, **limits: object) -> None:
        super().__init__(store_timeout_s=1.0, num_ranks=num_ranks, **(PAGES | limits))

    def asked(self) -> list[FetchPages]:
        """Plan as far as goes without an answer; returns what is asked."""
        self.plan()
        return [FetchPages.of(one) for one in self.planner.outgoing()]

    def answer(self, fetch: FetchPages, num_pages: int | None = None, rank: int = 0) -> None:
        there = self.device.fetch(fetch)
        num_pages = there if num_pages is None else num_pages
        self.planner.received(PagesFetched(rank=rank, fetch_id=fetch.fetch_id, num_pages=num_pages).message())

    def serve(self, request_id: int, prompt: np.ndarray, **params: object) -> int:
        """One request from its beginning to its end; returns its cached tokens."""
        self.submit(request_id, prompt, max_tokens=4, ignore_eos=True, **params)
        for fetch in self.asked():
            self.answer(fetch)
        self.finish()
        return self.cached[request_id]

    @property
    def landings(self) -> list[Landing]:
        return [landing for step in self.steps for landing in moves_of(step).landings]


@pytest.mark.parametrize("num_host_pages", [0, 10])
def test_prompts_that_have_left_the_pool_are_found_in_the_store(num_host_pages: int) -> None:
    bench = Stored(num_host_pages=num_host_pages)
    prompts = [prompt_of(40, seed=seed) for seed in range(6)]
    assert sum(bench.serve(number, prompt) for number, prompt in enumerate(prompts)) == 0
    assert [bench.serve(10 + number, prompt) for number, prompt in enumerate(prompts)] == [36] * 6
    assert bench.streams == bench.expected
    assert bench.landings


def test_another_engine_finds_them_too_and_only_under_the_same_salt() -> None:
    first, second = Stored(), Stored()
    prompt = prompt_of(40)
    first.serve(0, prompt, salt="one")
    first.serve(1, prompt_of(40, seed=9))  # what is saved goes with the next step
    second.device.stored = first.device.stored
    assert [second.serve(number, prompt, salt=salt) for number, salt in enumerate(("", "two", "one"))] == [0, 0, 36]
    assert second.streams == second.expected


def test_what_comes_from_the_store_is_not_saved_again() -> None:
    first, second = Stored(), Stored()
    first.serve(0, prompt_of(40))
    first.serve(1, prompt_of(40, seed=9))
    second.device.stored = dict(first.device.stored)
    second.serve(0, prompt_of(40))
    saved = np.concatenate([np.frombuffer(moves_of(step).save_pages, dtype=np.int32) for step in second.steps])
    assert len(saved) == 1, "of the ten pages that are whole in the end, nine came from the store"


def test_others_start_while_one_waits() -> None:
    bench = Stored()
    bench.submit(0, prompt_of(40), max_tokens=4)
    bench.submit(1, prompt_of(12, seed=1), max_tokens=4)  # too short to ask
    (fetch,) = bench.asked()
    assert bench.started == [1]
    assert bench.planner.stats().waiting == 1
    bench.answer(fetch)
    bench.finish()
    assert bench.streams == bench.expected


def test_every_rank_must_have_a_page() -> None:
    first, second = Stored(), Stored(num_ranks=2)
    first.serve(0, prompt_of(40))
    first.serve(1, prompt_of(40, seed=9))
    second.device.stored = first.device.stored
    second.submit(0, prompt_of(40), max_tokens=4, ignore_eos=True)
    (fetch,) = second.asked()
    second.answer(fetch, num_pages=9)
    assert not second.plan(), "the other rank has not answered"
    second.answer(fetch, num_pages=2, rank=1)
    second.finish()
    assert second.cached[0] == 8
    assert second.streams == second.expected


def test_what_others_have_cached_meanwhile_is_left_out() -> None:
    first, second = Stored(), Stored()
    first.serve(0, prompt_of(60))
    first.serve(1, prompt_of(40, seed=9))
    second.device.stored = first.device.stored
    second.submit(0, prompt_of(60), max_tokens=4, ignore_eos=True)
    (slow,) = second.asked()
    second.submit(1, prompt_of(60)[:30], max_tokens=1, ignore_eos=True)  # asks for less than it would wait for
    while second.plan() or second.deliver():
        pass
    assert second.planner.outgoing() == []
    second.answer(slow)
    second.finish()
    (landing,) = second.landings
    assert (landing.first, len(landing.pages) // 4) == (7, 7), "seven pages came from the other request"
    assert second.streams == second.expected


def test_who_ends_while_waiting_is_let_go_of() -> None:
    bench = Stored()
    bench.submit(0, prompt_of(40), max_tokens=4)
    bench.submit(1, prompt_of(40, seed=1), max_tokens=4)
    waits, answered = bench.asked()
    bench.answer(answered)
    bench.planner.abort(0)
    bench.planner.abort(1)
    assert bench.planner.stats().waiting == 0
    bench.answer(waits)  # too late
    bench.read()
    bench.submit(2, prompt_of(12), max_tokens=4)
    bench.step()
    assert [*bench.landings] == [Landing(fetch_id=waits.fetch_id), Landing(fetch_id=answered.fetch_id)]
    assert (bench.streams[0], bench.streams[1]) == ([], [])


def test_pages_of_a_request_that_another_feature_holds_are_let_go_of_at_its_end() -> None:
    """Its answer has come, and it waits for pages that another request computes."""
    bench = Stored(max_running=4, max_step_tokens=32, prefill_chunk=16)
    for number in range(2):
        bench.submit(number, np.concatenate((prompt_of(60), prompt_of(8, seed=number))), max_tokens=2, ignore_eos=True)
    first, second = bench.asked()
    bench.answer(first), bench.answer(second)
    bench.step()
    assert bench.started == [0], "the other one stands aside, though the step has room"
    bench.planner.abort(1)
    assert bench.planner.stats().waiting == 0
    bench.finish()
    assert Landing(fetch_id=second.fetch_id) in bench.landings
    assert bench.streams[0] == bench.expected[0]


def test_who_waits_when_the_device_is_lost_asks_again() -> None:
    bench = Stored()
    bench.submit(0, prompt_of(40), max_tokens=4, ignore_eos=True)
    (before,) = bench.asked()
    lose_the_device(bench)
    (after,) = bench.asked()
    assert after.fetch_id != before.fetch_id
    assert after.tokens == before.tokens
    bench.planner.received(
        PagesFetched(rank=0, fetch_id=before.fetch_id, num_pages=9).message()
    )  # of the device that is gone
    assert not bench.plan()
    bench.answer(after)
    bench.finish()
    assert bench.streams == bench.expected


def test_only_so_many_wait_at_once() -> None:
    bench = Stored(max_running=MOST_WAITING + 2, num_pages=200)
    for number in range(MOST_WAITING + 2):
        bench.submit(number, prompt_of(40, seed=number), max_tokens=4, ignore_eos=True)
    asked = bench.asked()
    assert (len(asked), bench.asked(), bench.started) == (MOST_WAITING, [], [])
    bench.answer(asked[0])
    asked = asked[1:]
    while asked:
        asked += bench.asked()
        bench.answer(asked.pop(0))
    bench.finish()
    assert bench.streams == bench.expected


def test_without_a_store_nothing_is_asked_or_saved() -> None:
    bench = Bench(page_size=4, num_pages=24, max_len=96)
    bench.submit(0, prompt_of(40), max_tokens=4)
    bench.finish()
    assert not any(step.parts for step in bench.steps)
    assert bench.planner.outgoing() == []
