"""A picture of the radix tree: true where it is complete, hot where it is not, and never expensive."""

from functools import partial

import numpy as np

from engine.features.host_tier.tree import TieredTree
from engine.kv.node import Namespace
from engine.kv.outline import FAN, MAX_VISITS, Outline
from engine.kv.radix import RadixTree
from engine.plugins.eviction.lru import LeastRecentlyUsed
from tests.kv.inserting import insert

PAGE = 4


class Cache:
    """A tree, filled with whole prompts."""

    def __init__(self, num_host_pages: int = 0) -> None:
        kind = partial(TieredTree, num_host_pages=num_host_pages) if num_host_pages else RadixTree
        self.tree = kind(PAGE, LeastRecentlyUsed())
        self._next_page = 0

    def insert(self, tokens: list[int], salt: str = "") -> None:
        count = len(tokens) // PAGE
        pages = np.arange(self._next_page, self._next_page + count, dtype=np.int32)
        self._next_page += count
        insert(self.tree, self.tree.key(np.array(tokens, dtype=np.int32)), pages, Namespace(salt))

    def ask(self, tokens: list[int]) -> None:
        handle = self.tree.lock(self.tree.match(self.tree.key(np.array(tokens, dtype=np.int32))))
        self.tree.unlock(handle)


def run(first: int, num_pages: int) -> list[int]:
    return list(range(first, first + num_pages * PAGE))


def shape(outline: Outline) -> list[tuple[int, int, int]]:
    return [(node.parent, node.first_page, node.num_pages) for node in outline.nodes]


def test_an_empty_tree_is_an_empty_picture() -> None:
    assert Cache().tree.outline(10) == Outline()


def test_parents_come_before_their_children_and_know_where_they_begin() -> None:
    cache = Cache()
    cache.insert(run(0, 4) + run(100, 2))
    cache.insert(run(0, 4) + run(200, 3))
    cache.insert(run(0, 2) + run(300, 1))
    outline = cache.tree.outline(10)
    assert outline.complete
    assert sorted((first_page, num_pages) for _, first_page, num_pages in shape(outline)) == [
        (0, 2), (2, 1), (2, 2), (4, 2), (4, 3)
    ]  # fmt: skip
    assert all(node.parent < index for index, node in enumerate(outline.nodes))
    assert sum(node.num_pages for node in outline.nodes) == cache.tree.num_cached
    for node in outline.nodes:
        if node.parent >= 0:
            above = outline.nodes[node.parent]
            assert node.first_page == above.first_page + above.num_pages
    first = np.frombuffer(outline.nodes[0].first_tokens, dtype=np.int32).tolist()
    assert first == run(0, 2)


def test_what_is_asked_for_most_is_shown_when_not_all_is() -> None:
    cache = Cache()
    for number in range(50):
        cache.insert(run(number * 1000, 2))
    for _ in range(7):
        cache.ask(run(13_000, 2))
    (hottest,) = cache.tree.outline(1).nodes
    assert (hottest.hits, hottest.locks) == (7, 0)
    assert not cache.tree.outline(1).complete
    assert cache.tree.outline(50).complete


def test_locks_and_idle_steps_are_those_of_now() -> None:
    cache = Cache()
    cache.tree.now = 3
    cache.insert(run(0, 2))
    cache.tree.now = 10
    handle = cache.tree.lock(cache.tree.match(cache.tree.key(np.array(run(0, 1), dtype=np.int32))))
    above, below = cache.tree.outline(10).nodes
    assert (above.locks, above.idle_steps, above.num_children) == (1, 0, 1)
    assert (below.locks, below.idle_steps, below.parent) == (0, 7, 0)
    cache.tree.unlock(handle)


def test_namespaces_are_numbers_and_salts_are_not_told() -> None:
    cache = Cache()
    cache.insert(run(0, 2))
    cache.insert(run(0, 2), salt="tenant")
    nodes = cache.tree.outline(10).nodes
    assert {(node.namespace, node.salted) for node in nodes} == {(0, True), (1, False)}


def test_pages_that_moved_to_the_host_are_shown() -> None:
    cache = Cache(num_host_pages=8)
    cache.insert(run(0, 4))
    cache.ask(run(0, 4))
    cache.tree.evict(4)
    (node,) = cache.tree.outline(10).nodes
    assert (node.num_pages, node.num_host_pages) == (0, 4)


def test_looking_costs_the_same_in_a_tree_of_any_width_and_depth() -> None:
    cache = Cache()
    for number in range(4000):
        cache.insert(run(0, 1) + run(1_000_000 + number * 100, 1 + number % 3))
    deep: list[int] = []
    for level in range(400):
        deep += run(2_000_000 + level * 1000, 1)
        cache.insert(deep + run(5_000_000 + level * 1000, 1))
    for number in range(500):
        cache.insert(run(number, 1), salt=f"tenant {number}")
    outline = cache.tree.outline(10_000)
    assert not outline.complete
    # One node's children may push it over; nothing is looked at after that.
    assert len(outline.nodes) <= MAX_VISITS + 2 * FAN
    before = cache.tree.num_evictable
    cache.tree.check()
    assert cache.tree.num_evictable == before
