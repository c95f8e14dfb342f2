"""What goes first, how much of it, and at what cost."""

import numpy as np
import pytest

from engine.kv.eviction import CHUNK, Candidate, EvictionQueue, SortKey
from engine.kv.node import Node
from engine.kv.radix import RadixTree
from engine.plugins.manager import Plugins
from engine.types.errors import PluginError
from tests.kv.cache_model import STRATEGIES, strategy
from tests.kv.inserting import insert


def ids(name: str, count: int = 4) -> np.ndarray:
    return np.arange(count, dtype=np.int32) + 1000 * ord(name[0])


class Shelf:
    """A tree at page size 1 whose prompts have names; 'a' has pages 0, 1, ..., 'b' has 100, 101, ..."""

    def __init__(self, strategy_name: str, **options: object) -> None:
        self.tree = RadixTree(1, strategy(strategy_name, **options))

    def put(self, names: str, count: int = 4) -> None:
        for name in names:
            first = 100 * (ord(name) - ord("a"))
            self.tree.now += 1
            insert(self.tree, self.tree.key(ids(name, count)), np.arange(first, first + count, dtype=np.int32))

    def hit(self, names: str, priority: int = 0) -> None:
        for name in names:
            self.tree.now += 1
            self.tree.unlock(self.tree.lock(self.tree.match(self.tree.key(ids(name))), priority))

    def order(self, count: int = 4) -> str:
        """The names in the order in which they go."""
        gone = ""
        while self.tree.num_evictable:
            pages = self.tree.evict(count)
            self.tree.check()
            gone += chr(ord("a") + int(pages[0]) // 100)
        return gone


def test_lru_evicts_what_was_used_longest_ago() -> None:
    shelf = Shelf("lru")
    shelf.put("abcd")
    shelf.hit("ba")
    assert shelf.order() == "cdba"


def test_fifo_evicts_what_came_first() -> None:
    shelf = Shelf("fifo")
    shelf.put("abcd")
    shelf.hit("aaab")
    assert shelf.order() == "abcd"


def test_lfu_evicts_what_was_hit_least_then_what_was_used_longest_ago() -> None:
    shelf = Shelf("lfu")
    shelf.put("abcd")
    shelf.hit("bbaddd")
    assert shelf.order() == "cabd"


def test_priority_evicts_the_least_urgent_first() -> None:
    shelf = Shelf("priority")
    shelf.put("abcd")
    shelf.hit("a", priority=-5)
    shelf.hit("c", priority=-1)
    shelf.hit("a", priority=7)
    assert shelf.order() == "bdca"


def test_slru_evicts_what_was_not_hit_again_first() -> None:
    shelf = Shelf("slru")
    shelf.put("abcd")
    shelf.hit("aabcc")
    shelf.hit("d")
    assert shelf.order() == "bdac"
    shelf = Shelf("slru", protected_hits=1)
    shelf.put("abcd")
    shelf.hit("ba")
    assert shelf.order() == "cdba"


def test_s3fifo_keeps_what_was_hit_or_came_back_through_a_scan() -> None:
    tree = RadixTree(1, strategy("s3fifo", num_pages=40))
    first = 0

    def put(name: str) -> None:
        nonlocal first
        tree.now += 1
        tree.evict(max(0, tree.num_cached + 4 - 40))
        insert(tree, tree.key(ids(name)), np.arange(first, first + 4, dtype=np.int32))
        first += 4

    def has(name: str) -> bool:
        return tree.match(tree.key(ids(name))).num_pages == 4

    for name in "ab":
        put(name)
    tree.unlock(tree.lock(tree.match(tree.key(ids("a")))))
    for name in "cdefghijklmnopq":  # more than the pool has room for
        put(name)
    assert has("a"), "it was hit"
    assert not has("b")
    put("b")  # a ghost
    for name in "rstuvwxy":
        put(name)
    assert has("b"), "it came back"
    for name in (chr(code) for code in range(0x100, 0x118)):
        put(name)
    assert not has("a"), "what nobody asks for any more goes in the end"
    assert not has("b")
    tree.check()


def test_a_strategy_that_listens_hears_of_every_page_that_leaves() -> None:
    class Listening:
        def __init__(self) -> None:
            self.gone: list[bytes] = []

        def rank(self, candidate: Candidate) -> SortKey:
            assert len(candidate.page_hashes) == candidate.num_pages
            return (candidate.last_used,)

        def evicted(self, candidate: Candidate) -> None:
            self.gone += candidate.page_hashes

    listening = Listening()
    tree = RadixTree(2, listening, record_events=True)
    for number, name in enumerate("abc"):
        tree.now += 1
        insert(tree, tree.key(ids(name, 20)), np.arange(10 * number, 10 * number + 10, dtype=np.int32))
    for count in (3, 4, 7, 16):
        tree.evict(count)
    events = tree.drain_events()
    removed = [name for event in events if event.kind == "removed" for name in event.hashes]
    stored = [name for event in events if event.kind == "stored" for name in event.hashes]
    assert listening.gone == removed
    assert sorted(removed) == sorted(stored)


def test_a_parent_goes_after_its_last_child_with_their_uses() -> None:
    tree = RadixTree(1, strategy("lfu"))
    stem, lone = ids("s"), ids("z")
    branches = [np.concatenate((stem, ids(name))) for name in "ab"]
    for number, tokens in enumerate((*branches, lone)):
        insert(tree, tree.key(tokens), np.arange(100 * number, 100 * number + len(tokens), dtype=np.int32))
    for tokens in (*branches, lone, lone):
        tree.now += 1
        tree.unlock(tree.lock(tree.match(tree.key(tokens))))
    # One hit each went through the stem, so it has as many as the lone prompt, and was used less lately.
    assert [sorted(tree.evict(4).tolist()) for _ in range(4)] == [
        [4, 5, 6, 7],
        [104, 105, 106, 107],
        [0, 1, 2, 3],
        [200, 201, 202, 203],
    ]
    tree.check()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_never_more_pages_than_asked_for(name: str, page_size: int) -> None:
    tree = RadixTree(page_size, strategy(name))
    stem = np.arange(5 * page_size, dtype=np.int32)
    for number in range(6):
        tokens = np.concatenate((stem, np.full(7 * page_size, number, dtype=np.int32)))
        insert(tree, tree.key(tokens), np.arange(12 * number, 12 * number + 12, dtype=np.int32))
    left, freed = tree.num_cached, []
    assert left == 5 + 6 * 7
    for count in (1, 2, 3, 9, 0, 1, 13, 100):
        pages = tree.evict(count)
        assert len(pages) == min(count, left)
        left -= len(pages)
        freed += pages.tolist()
        tree.check()
        assert tree.num_cached == left
    assert len(set(freed)) == len(freed) == 47


def test_part_of_a_leaf_goes_from_its_tail() -> None:
    shelf = Shelf("lru")
    shelf.put("a", count=10)
    assert sorted(shelf.tree.evict(3).tolist()) == [7, 8, 9]
    assert shelf.tree.match(shelf.tree.key(ids("a", 10))).num_pages == 7


@pytest.mark.parametrize("name", STRATEGIES)
def test_eviction_asks_the_strategy_about_one_node_not_about_all(name: str) -> None:
    class Counting:
        def __init__(self) -> None:
            self.inner, self.asked = strategy(name), 0

        def rank(self, candidate: Candidate) -> SortKey:
            self.asked += 1
            return self.inner.rank(candidate)

    counting = Counting()
    tree = RadixTree(1, counting)
    for number in range(3000):
        tokens = np.array([number % 7, number], dtype=np.int32)
        insert(tree, tree.key(tokens), np.array([2 * number, 2 * number + 1], dtype=np.int32))
    counting.asked = 0
    for _ in range(100):
        assert len(tree.evict(1)) == 1
    assert counting.asked <= 2


def test_queue_equals_a_sorted_list() -> None:
    rng = np.random.default_rng(0)
    queue = EvictionQueue(lambda node: (node.last_used, node.hits))
    nodes: list[Node] = []
    for step in range(6000):
        growing = 1 if step < 3000 else -1
        if not nodes or rng.random() < 0.5 + 0.3 * growing:
            node = Node(None, b"", bytearray(), bytearray(), int(rng.integers(50)), 0)
            node.hits = int(rng.integers(3))
            queue.add(node)
            nodes.append(node)
        else:
            node = nodes.pop(int(rng.integers(len(nodes)))) if rng.random() < 0.7 else queue.first()
            assert node is not None
            queue.remove(node)
            nodes = [other for other in nodes if other is not node]
        if step % 50 == 0:
            queue.check()
            expected = sorted(nodes, key=lambda node: node.place[:-1])
            assert queue.nodes() == expected
            assert queue.first() is (expected[0] if expected else None)
            assert len(queue._chunks) <= 1 + len(nodes) * 8 / CHUNK


@pytest.mark.parametrize("name", STRATEGIES)
def test_options_a_strategy_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(PluginError, match=rf"'eviction.{name}'.*`sped`"):
        strategy(name, sped=1)


def test_an_impossible_option_is_refused() -> None:
    with pytest.raises(PluginError, match="protected_hits"):
        strategy("slru", protected_hits=0)


def test_an_unknown_strategy_lists_the_choices() -> None:
    with pytest.raises(PluginError, match="available: fifo, lease, lfu, lru, priority, s3fifo, slru"):
        Plugins({"eviction": "random"})
