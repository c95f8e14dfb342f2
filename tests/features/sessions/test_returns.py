"""Prefixes on the host are fetched before their sessions return: in time, few at once, in place of no lease."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from engine.features.host_tier.tree import TieredTree
from engine.features.sessions import returns
from engine.features.sessions.leases import Leases
from engine.features.sessions.planner import NAME, SessionsPlanner, session_part
from engine.features.sessions.returns import Returns
from engine.messages import Admit
from engine.plugins.eviction.lease import LeaseOptions, LeaseOrder
from engine.scheduling.feature import PlannerParts
from engine.types.params import SamplingParams
from engine.types.prompt import Origin
from tests.scheduling.bench import Bench, prompt_of

PROMPT = 24  # of six pages
NUM_PAGES, NUM_HOST = 16, 64


class Paused:
    """A planner with a host tier, whose client's sessions pause for 5 seconds as a rule."""

    def __init__(self, *, num_host_pages: int = NUM_HOST, fetches: bool = True) -> None:
        built: list[SessionsPlanner] = []

        def build(parts: PlannerParts) -> SessionsPlanner:
            options = LeaseOptions(max_lease_s=20.0)
            built.append(SessionsPlanner(parts, Leases(10 * parts.limits.num_pages, options), fetches=fetches))
            return built[0]

        sizes = {"num_pages": NUM_PAGES, "max_len": 48, "max_running": 2, "depth": 1}
        self.bench = Bench(features=[build], num_host_pages=num_host_pages, strategy=LeaseOrder(), **sizes)
        (self.feature,) = built
        self.feature._steps_per_second = lambda now, step: 100.0  # type: ignore[method-assign]
        self.number = 0
        self.ask("habit", seed=1000, tokens=4)
        for _ in range(17):
            self.bench.now += 5.0
            self.ask("habit", seed=1000, tokens=4)

    def ask(self, session: str, *, seed: int, tokens: int = PROMPT) -> int:
        """Serve a request; return how many of its tokens needed no computing.  session: '' for none."""
        self.number += 1
        parts = {NAME: session_part(session)} if session else {}
        self.bench.streams[self.number], self.bench.ends[self.number] = [], []
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        ids = np.asarray(prompt_of(tokens, seed=seed), np.int32).tobytes()
        self.bench.planner.admit(
            Admit(request_id=self.number, token_ids=ids, params=params, parts=parts, origin=Origin(client="c"))
        )
        self.bench.finish()
        return self.bench.cached[self.number]

    def tick(self, seconds: float) -> None:
        """Let time pass, with a small request of another client's in it: fetches travel with steps."""
        self.bench.now += seconds
        self.ask("", seed=3000, tokens=2)

    def on_host(self, seed: int) -> int:
        """Return how many pages of a prompt are on the host alone."""
        tree = self.bench.planner.pages.tree
        return tree.match(tree.key(np.asarray(prompt_of(PROMPT, seed=seed), np.int32))).num_host_pages

    @property
    def num_fetched(self) -> int:
        return self.feature.gauges()["fetched_pages"]


def evicted(paused: Paused) -> None:
    """Let a session's prefix go to the host while its lease runs: two prompts that count for more take the pool."""
    paused.ask("a", seed=1)
    for seed in (2, 3):
        paused.bench.now += 0.1
        paused.ask(f"b{seed}", seed=seed)
    assert paused.on_host(1) > 0


def freed(paused: Paused) -> None:
    """End the other leases of ``evicted``, so that their pages may be taken."""
    tree = paused.bench.planner.pages.tree
    assert isinstance(tree, TieredTree)
    paused.bench.planner.pages.allocator.evict(tree.evict(8))


def test_a_prefix_comes_back_before_its_session() -> None:
    paused = Paused()
    evicted(paused)
    freed(paused)
    paused.tick(0.1)
    assert paused.num_fetched == 0, "no pause is so short"
    missing = paused.on_host(1)
    paused.tick(4.0)
    assert paused.num_fetched >= missing > 0
    assert paused.on_host(1) == 0
    moved = paused.bench.device.num_moved_back
    assert paused.ask("a", seed=1) == PROMPT - 4
    assert paused.bench.device.num_moved_back == moved, "its own step copies nothing"
    paused.bench.planner.check()


def test_nothing_is_fetched_in_place_of_a_lease_that_runs() -> None:
    paused = Paused()
    evicted(paused)
    paused.tick(4.0)
    assert paused.num_fetched == 0


def test_few_pages_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "MOST_PAGES", 2)
    paused = Paused()
    evicted(paused)
    freed(paused)
    paused.bench.now += 4.0
    for _ in range(2):
        before = paused.num_fetched
        paused.tick(0.03)
        assert paused.num_fetched - before <= 2 * 2, "a tick has a step or two"


def test_what_has_returned_is_not_fetched() -> None:
    paused = Paused()
    evicted(paused)
    paused.bench.now += 4.0
    paused.ask("a", seed=900)  # goes on with something else
    freed(paused)
    before = paused.on_host(1)
    paused.tick(0.1)
    assert paused.on_host(1) == before > 0


def test_a_host_that_is_full_gives_up_what_it_would_fetch_and_no_page_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "chance", lambda *_: 1.0)
    paused = Paused(num_host_pages=7)
    for number in range(24):
        paused.ask(f"s{number % 4}", seed=number % 4)
        freed(paused)
        paused.tick(1.2)
        paused.bench.planner.check()
    assert paused.num_fetched > 0


def test_it_can_be_switched_off() -> None:
    paused = Paused(fetches=False)
    evicted(paused)
    freed(paused)
    paused.tick(4.0)
    assert paused.num_fetched == 0 < paused.on_host(1)


@pytest.mark.parametrize("mistake", ["takes leased pages", "fetches for the returned", "loses pages", "is too early"])
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks one of the rules above."""
    find: Callable[[], None]
    if mistake == "takes leased pages":
        find = test_nothing_is_fetched_in_place_of_a_lease_that_runs
        monkeypatch.setattr(TieredTree, "next_out", lambda self: ((-1,), 1) if self.num_evictable else None)
    elif mistake == "fetches for the returned":
        find = test_what_has_returned_is_not_fetched
        monkeypatch.setattr(Returns, "end", lambda self, key: None)
        monkeypatch.setattr(Returns, "begin", lambda self, key, pause: self._pauses.setdefault(key, pause))
    elif mistake == "loses pages":
        find = partial(test_a_host_that_is_full_gives_up_what_it_would_fetch_and_no_page_is_lost, monkeypatch)
        monkeypatch.setattr(TieredTree, "restore", lambda self, handle, key, pages: len(pages))
    else:
        find = test_a_prefix_comes_back_before_its_session
        monkeypatch.setattr(Leases, "chance", lambda *_: 1.0)
    with pytest.raises(AssertionError):
        find()
