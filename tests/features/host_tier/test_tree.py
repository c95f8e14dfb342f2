"""The host tier: what evicted pages leave behind, how it comes back, and what goes when the host is full too."""

import numpy as np

from engine.features.host_tier.tree import TieredTree
from engine.kv.node import Handle
from engine.kv.radix import RadixTree
from engine.plugins.eviction.lease import leased
from tests.kv.cache_model import strategy
from tests.kv.inserting import insert


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 17, count).astype(np.int32)


def pages_from(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


class Cache:
    """A tree at page size 4 with a host tier, prompts of ten pages each, and the transfers so far."""

    def __init__(self, num_host_pages: int, num_prompts: int = 1, name: str = "lru") -> None:
        self.tree = TieredTree(4, strategy(name), num_host_pages=num_host_pages)
        self.prompts = [ids(40, seed) for seed in range(num_prompts)]
        for number, prompt in enumerate(self.prompts):
            self.tree.now = number
            insert(self.tree, self.tree.key(prompt), pages_from(10 * number, 10))

    def counts(self, number: int = 0) -> tuple[int, int]:
        """Pages on the device and beyond those on the host."""
        match = self.tree.match(self.tree.key(self.prompts[number]))
        return match.num_pages, match.num_host_pages

    def lock(self, number: int = 0) -> Handle:
        return self.tree.lock(self.tree.match(self.tree.key(self.prompts[number])))

    def restore(self, handle: Handle, first: int, count: int, number: int = 0) -> int:
        restored = self.tree.restore(handle, self.tree.key(self.prompts[number]), pages_from(first, count))
        self.tree.check()
        return restored


def test_evicted_pages_are_found_on_the_host() -> None:
    cache = Cache(num_host_pages=10)
    assert cache.tree.evict(4).tolist() == [6, 7, 8, 9]
    cache.tree.check()
    assert cache.counts() == (6, 4)
    (transfer,) = cache.tree.drain_transfers()
    assert transfer.to_host
    assert transfer.device_pages.tolist() == [6, 7, 8, 9]
    assert len(set(transfer.host_pages.tolist())) == 4 == cache.tree.host.num_used
    assert cache.tree.drain_transfers() == []


def test_a_lease_keeps_its_place_in_host_memory() -> None:
    cache = Cache(num_host_pages=20, num_prompts=3, name="lease")
    handle = cache.lock(0)
    handle.priority = leased(cache.tree.now + 100)
    cache.tree.unlock(handle)
    cache.tree.now += 1
    cache.tree.unlock(cache.lock(1))
    cache.tree.evict(30)  # one of the three has no place on the host: the leased one went last, the last one first
    cache.tree.check()
    assert cache.counts(0) == (0, 10)
    cache.tree.now += 1
    cache.tree.unlock(cache.lock(1))  # on the host, and now the last one that was used
    insert(cache.tree, cache.tree.key(ids(40, 9)), pages_from(10, 10))
    cache.tree.evict(10)  # a later prompt, which has no lease, takes the place of another
    cache.tree.check()
    assert cache.counts(0) == (0, 10)
    assert [sum(cache.counts(number)) for number in (1, 2)] == [0, 0]


def test_pages_evicted_one_by_one_are_one_node_on_the_host() -> None:
    cache = Cache(num_host_pages=10)
    for _ in range(9):
        cache.tree.evict(1)
        cache.tree.check()
    assert cache.counts() == (1, 9)
    (top,) = next(iter(cache.tree._roots.values())).children.values()
    (below,) = top.children.values()
    assert not below.children


def test_restored_pages_are_read_from_where_they_were_written() -> None:
    cache = Cache(num_host_pages=10)
    cache.tree.evict(10)
    memory = {page: f"prompt page {page}" for page in range(10)}
    host: dict[int, str] = {}
    handle = cache.lock()
    assert (handle.num_pages, cache.restore(handle, 50, 10)) == (0, 10)
    assert cache.tree.pages(handle).tolist() == list(range(50, 60))
    for transfer in cache.tree.drain_transfers():
        for device, on_host in zip(transfer.device_pages.tolist(), transfer.host_pages.tolist(), strict=True):
            if transfer.to_host:
                host[on_host] = memory[device]
            else:
                memory[device] = host[on_host]
    assert [memory[page] for page in range(50, 60)] == [f"prompt page {page}" for page in range(10)]
    assert cache.tree.num_protected == 10


def test_as_much_is_restored_as_there_are_pages_for() -> None:
    cache = Cache(num_host_pages=10)
    cache.tree.evict(10)
    handle = cache.lock()
    assert cache.restore(handle, 50, 3) == 3
    assert cache.counts() == (3, 7)
    assert cache.restore(handle, 60, 0) == 0
    assert cache.restore(handle, 60, 20) == 7
    assert cache.counts() == (10, 0)


def test_pages_which_another_request_brought_back_first_are_not_taken_twice() -> None:
    cache = Cache(num_host_pages=10)
    cache.tree.evict(10)
    late, early = cache.lock(), cache.lock()
    cache.restore(early, 50, 3)
    assert cache.restore(late, 60, 10) == 0
    assert (late.num_pages, cache.counts()) == (0, (3, 7))


def test_what_was_restored_needs_no_second_copy() -> None:
    cache = Cache(num_host_pages=10)
    cache.tree.evict(10)
    handle = cache.lock()
    cache.restore(handle, 50, 10)
    cache.tree.unlock(handle)
    cache.tree.drain_transfers()
    cache.tree.evict(10)
    assert cache.tree.drain_transfers() == []
    assert cache.counts() == (0, 10)


def test_a_request_that_computes_anew_brings_the_pages_back_without_a_copy() -> None:
    cache = Cache(num_host_pages=10)
    cache.tree.evict(8)
    cache.tree.drain_transfers()
    handle = cache.lock()
    published = cache.tree.publish(handle, cache.tree.key(cache.prompts[0]), pages_from(0, 10))
    cache.tree.check()
    assert (len(published.duplicates), cache.counts()) == (0, (10, 0))
    assert cache.tree.drain_transfers() == []


def test_the_host_forgets_what_was_used_longest_ago() -> None:
    cache = Cache(num_host_pages=25, num_prompts=3)
    cache.tree.evict(10)
    cache.tree.now = 10
    cache.tree.unlock(cache.lock(0))  # a hit on host pages counts as a use
    cache.tree.evict(20)
    cache.tree.check()
    assert [cache.counts(number) for number in range(3)] == [(0, 10), (0, 5), (0, 10)]


def test_copies_of_what_the_device_holds_go_first() -> None:
    cache = Cache(num_host_pages=10, num_prompts=2)
    cache.tree.evict(10)
    handle = cache.lock(0)
    cache.restore(handle, 50, 10)
    cache.tree.evict(10)  # prompt 1, the only one that no handle keeps
    cache.tree.check()
    assert [cache.counts(number) for number in range(2)] == [(10, 0), (0, 10)]


def test_of_two_copies_the_older_goes_first() -> None:
    cache = Cache(num_host_pages=20, num_prompts=3)
    cache.tree.evict(20)
    handles = [cache.lock(number) for number in (0, 1)]
    for number, handle in enumerate(handles):
        assert cache.restore(handle, 50 + 10 * number, 10, number) == 10
    cache.tree.evict(10)  # prompt 2, which needs the room of one copy
    cache.tree.drain_transfers()
    cache.tree.unlock(handles[1])
    cache.tree.evict(10)
    assert cache.counts(1) == (0, 10)
    assert cache.tree.drain_transfers() == [], "the copy of what came back last is still there"
    cache.tree.unlock(handles[0])
    cache.tree.evict(10)
    assert [len(transfer.host_pages) for transfer in cache.tree.drain_transfers()] == [10]


def test_a_host_too_small_for_a_leaf_is_left_alone() -> None:
    cache = Cache(num_host_pages=4)
    assert len(cache.tree.evict(10)) == 10
    cache.tree.check()
    assert (cache.counts(), cache.tree.host.num_used, cache.tree.drain_transfers()) == ((0, 0), 0, [])
    cache = Cache(num_host_pages=4)
    cache.tree.evict(4)
    cache.tree.evict(6)  # the rest does not fit, so its continuation is worthless
    cache.tree.check()
    assert (cache.counts(), cache.tree.host.num_used) == ((0, 0), 0)


def test_without_a_host_tier_nothing_is_kept() -> None:
    tree = RadixTree(4, strategy())
    insert(tree, tree.key(ids(40)), pages_from(0, 10))
    tree.evict(4)
    match = tree.match(tree.key(ids(40)))
    assert (match.num_pages, match.num_host_pages) == (6, 0)
