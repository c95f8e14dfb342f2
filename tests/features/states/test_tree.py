"""A tree whose prefixes need a state: how far a match goes, what a snapshot does to nodes, and which snapshot goes."""

import numpy as np

from engine.features.host_tier.tree import TieredTree
from engine.features.states.slots import SnapshotSlots
from engine.features.states.tree import StateTree
from engine.kv.node import SHARED, Handle
from tests.kv.cache_model import strategy

PAGE = 4


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 17, count).astype(np.int32)


class Cache:
    """A tree with ``num_slots`` slots, and requests that compute all of their tokens."""

    def __init__(self, num_slots: int = 4) -> None:
        self.slots = SnapshotSlots(100, num_slots)
        self.tree = StateTree(PAGE, strategy(), slots=self.slots)
        self.num_pages = 0

    def start(self, tokens: np.ndarray, num_tokens: int | None = None) -> Handle:
        """Publish the first tokens of a request, and keep its lock."""
        self.tree.now += 1
        key = self.tree.key(tokens[:num_tokens])
        handle = self.tree.lock(self.tree.match(key))
        pages = np.arange(self.num_pages, self.num_pages + len(key) // self.tree.page_bytes, dtype=np.int32)
        self.num_pages += len(pages)
        self.tree.publish(handle, key, pages)
        return handle

    def keep(self, handle: Handle, *pages: int) -> None:
        """Take snapshots after so many pages."""
        for count in pages:
            slot = self.tree.take_slot()
            assert slot is not None
            self.tree.keep(handle, count, slot)
            self.check()

    def insert(self, tokens: np.ndarray, *pages: int) -> None:
        """A request with snapshots after so many pages, which has ended."""
        handle = self.start(tokens)
        self.keep(handle, *pages)
        self.tree.unlock(handle)

    def found(self, tokens: np.ndarray) -> int:
        """The cached pages of a prompt, by its match and its lock."""
        self.check()
        match = self.tree.match(self.tree.key(tokens))
        handle = self.tree.lock(match)
        assert handle.num_pages == match.num_pages == len(match.pages) == len(self.tree.pages(handle))
        self.tree.unlock(handle)
        return match.num_pages

    def check(self) -> None:
        self.tree.check()
        self.slots.check(self.tree.slots_held())


def test_a_match_goes_back_to_the_deepest_snapshot() -> None:
    cache, prompt = Cache(), ids(40)
    cache.insert(prompt, 3, 7)
    other = prompt.copy()
    other[5 * PAGE] += 1
    assert cache.found(prompt) == 7
    assert cache.found(other) == 3
    assert cache.found(prompt[: 7 * PAGE]) == 7
    assert cache.found(prompt[: 7 * PAGE - 1]) == 3
    assert cache.found(prompt[: 3 * PAGE - 1]) == 0
    assert cache.tree.num_pages_of(cache.tree.key(other), SHARED) == 5


def test_pages_without_any_snapshot_are_not_found() -> None:
    cache, prompt = Cache(), ids(40)
    cache.insert(prompt)
    assert cache.found(prompt) == 0
    assert cache.tree.num_pages_of(cache.tree.key(prompt), SHARED) == 10


def test_a_lent_snapshot_keeps_its_slot() -> None:
    """It is the worst one when others need slots, and leaves when it is taken back."""
    cache, prompt = Cache(num_slots=2), ids(40)
    cache.insert(prompt, 5)
    lent = cache.tree.lock(cache.tree.match(cache.tree.key(prompt[: 5 * PAGE])))
    slot = cache.tree.slot_of(lent)
    cache.tree.lend_state(lent)
    assert not cache.tree.may_lend, "one of two slots stays for others"
    assert cache.tree.num_to_take == 1
    for seed in (1, 2):
        cache.insert(ids(40, seed), 5)
        assert cache.tree.slot_of(lent) == slot
    assert cache.found(ids(40, 1)) == 0, "it has left for the next one"
    cache.tree.take_back(lent)
    cache.tree.unlock(lent)
    cache.insert(ids(40, 3), 5)
    assert [cache.found(ids(40, seed)) for seed in (2, 3)] == [5, 5]
    assert cache.found(prompt) == 0


def test_a_node_with_a_snapshot_grows_no_further() -> None:
    cache, prompt = Cache(), ids(40)
    handle = cache.start(prompt, 5 * PAGE)
    cache.keep(handle, 5)
    cache.tree.publish(handle, cache.tree.key(prompt), np.arange(100, 110, dtype=np.int32))
    cache.tree.unlock(handle)
    assert cache.found(prompt) == 5


def test_a_snapshot_of_a_border_that_has_one_is_given_back() -> None:
    cache, prompt = Cache(num_slots=3), ids(40)
    cache.insert(prompt, 4)
    cache.insert(prompt, 4, 4)
    assert cache.slots.num_held == cache.tree.num_snapshots == 1


def test_the_slot_that_was_used_longest_ago_is_taken_first() -> None:
    cache, prompts = Cache(num_slots=3), [ids(20, seed) for seed in range(4)]
    for prompt in prompts[:3]:
        cache.insert(prompt, 2)
    cache.tree.now = 50
    cache.found(prompts[0])
    cache.insert(prompts[3], 2)
    assert [cache.found(prompt) for prompt in prompts] == [2, 0, 2, 2]


def test_a_snapshot_that_several_requests_started_from_outlives_newer_ones() -> None:
    cache, prompts = Cache(num_slots=3), [ids(20, seed) for seed in range(6)]
    cache.insert(prompts[0], 2)
    cache.found(prompts[0])
    cache.found(prompts[0])
    for prompt in prompts[1:]:
        cache.insert(prompt, 2)
    assert [cache.found(prompt) for prompt in prompts] == [2, 0, 0, 0, 2, 2]


def test_shared_snapshots_have_at_most_half_of_the_slots_for_good() -> None:
    cache, prompts = Cache(num_slots=3), [ids(20, seed) for seed in range(4)]
    for prompt in prompts[:3]:
        cache.insert(prompt, 2)
    for prompt in (prompts[1], prompts[0], prompts[1], prompts[0]):
        cache.tree.now += 1
        cache.found(prompt)
    cache.insert(prompts[3], 2)
    assert [cache.found(prompt) for prompt in prompts] == [2, 0, 2, 2]


def test_rows_that_hold_all_slots_leave_none() -> None:
    cache = Cache(num_slots=2)
    assert {cache.tree.take_slot(), cache.tree.take_slot()} == {100, 101}
    assert cache.tree.take_slot() is None


def test_a_snapshot_leaves_with_its_pages() -> None:
    cache, prompt = Cache(), ids(40)
    cache.insert(prompt, 3, 10)
    cache.tree.evict(1)
    assert cache.found(prompt) == 3
    cache.tree.evict(6)
    assert cache.found(prompt) == 3
    cache.tree.evict(1)
    assert cache.found(prompt) == 0
    assert cache.slots.num_held == 0


def test_a_tree_that_forgets_has_no_snapshots() -> None:
    cache, prompt = Cache(), ids(40)
    cache.insert(prompt, 3)
    cache.tree.forget()
    assert cache.found(prompt) == 0
    assert cache.slots.num_held == 0


def test_requests_of_another_namespace_find_nothing() -> None:
    cache, prompt = Cache(), ids(40)
    cache.insert(prompt, 3)
    assert cache.tree.match(cache.tree.key(prompt), SHARED._replace(cache_salt="other")).num_pages == 0


class TieredStateTree(StateTree, TieredTree):
    """A tree as a planner has it with a host tier."""


class Tiered(Cache):
    """The same with ``num_host_pages`` pages and two slots in host memory."""

    def __init__(self, num_host_pages: int) -> None:
        super().__init__()
        self.slots = SnapshotSlots(100, 4, 2)
        self.tree = TieredStateTree(PAGE, strategy(), slots=self.slots, num_host_pages=num_host_pages)

    def restored(self, tokens: np.ndarray) -> tuple[int, int]:
        """The pages of a prompt that come back from the host, and the slot of the state behind them."""
        assert isinstance(self.tree, TieredStateTree)
        key = self.tree.key(tokens)
        match = self.tree.match(key)
        handle = self.tree.lock(match)
        self.num_pages += match.num_host_pages
        pages = np.arange(self.num_pages - match.num_host_pages, self.num_pages, dtype=np.int32)
        count = self.tree.restore(handle, key, np.append(pages, [1 << 20, 1 << 21]).astype(np.int32))
        assert (count, handle.num_pages) == (match.num_host_pages, match.num_cached)
        found = count, self.tree.slot_of(handle) if handle.num_pages else 0
        self.tree.unlock(handle)
        self.check()
        return found


def test_evicted_pages_come_back_from_the_host_as_far_as_their_last_state() -> None:
    cache, tokens = Tiered(num_host_pages=16), ids(24)
    cache.insert(tokens, 2, 4)
    cache.tree.evict(6)
    cache.check()
    assert cache.slots.copies == [(101, 104), (100, 105)]
    assert cache.tree.match(cache.tree.key(tokens)).num_cached == 4
    assert cache.restored(tokens) == (4, 104)


def test_a_state_stays_on_the_device_if_there_is_no_slot_for_it_where_its_pages_go() -> None:
    cache, others = Tiered(num_host_pages=6), [ids(8, seed) for seed in range(3)]
    for tokens in others:
        cache.insert(tokens, 2)
    cache.tree.evict(6)
    cache.check()
    assert cache.slots.num_held_on_host == 2
    assert [cache.restored(tokens)[0] for tokens in others] == [2, 2, 2]


def test_the_host_s_worst_state_makes_room_and_the_last_one_goes_with_its_pages() -> None:
    cache, others = Tiered(num_host_pages=6), [ids(8, seed) for seed in range(4)]
    for tokens in others[:3]:
        cache.insert(tokens, 2)
    cache.tree.evict(6)
    taken = [cache.tree.take_slot() for _ in range(4)]  # the last one is that of a node, which goes to the host
    assert None not in taken
    assert [cache.tree.match(cache.tree.key(tokens)).num_cached for tokens in others[:3]] == [0, 2, 2]
    for slot in taken:
        assert slot is not None
        cache.slots.free(slot)
    cache.insert(others[3], 2)
    cache.tree.evict(2)
    assert [cache.restored(tokens)[0] for tokens in others] == [0, 2, 2, 2]
