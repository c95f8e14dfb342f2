"""The radix tree, case by case: page borders, splits, twins, namespaces, locks, sizes."""

import subprocess
import sys

import numpy as np
import pytest

from engine.kv.match import Match, common_bytes
from engine.kv.node import SHARED, Namespace
from engine.kv.radix import RadixTree
from tests.kv.cache_model import CacheModel, strategy
from tests.kv.inserting import insert

PAGE_SIZES = (1, 4, 16, 64)


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 17, count).astype(np.int32)


def tree_of(*prompts: np.ndarray, page_size: int = 4, **options: object) -> RadixTree:
    """A tree with these prompts, inserted one step after another; pages count up from 0."""
    tree = RadixTree(page_size, strategy(), **options)
    first = 0
    for prompt in prompts:
        key = tree.key(prompt)
        count = len(key) // tree.page_bytes
        insert(tree, key, pages_from(first, count))
        tree.now, first = tree.now + 1, first + count
        tree.check()
    return tree


def pages_from(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def look(tree: RadixTree, tokens: np.ndarray, namespace: Namespace = SHARED) -> Match:
    return tree.match(tree.key(tokens), namespace)


# ---- matching ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_match_ends_at_whole_pages(page_size: int, offset: int) -> None:
    prompt = ids(8 * page_size)
    tree = tree_of(prompt, page_size=page_size)
    for num_pages in range(1, 8):
        tokens = prompt[: num_pages * page_size + offset]
        match = look(tree, tokens)
        assert match.num_pages == len(tokens) // page_size
        assert match.pages.tolist() == list(range(match.num_pages))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 32, 33])
def test_first_difference_is_found_wherever_it_is(page_size: int, length: int) -> None:
    edge = ids(length * page_size)
    for position in range(len(edge)):
        other = edge.copy()
        other[position] += 1
        key = b"\1" * 5 + other.tobytes()
        common = common_bytes(bytearray(edge.tobytes()), key, 5, 4 * page_size)
        assert common == position // page_size * page_size * 4
    assert common_bytes(bytearray(edge.tobytes()), edge.tobytes(), 0, 4 * page_size) == edge.nbytes


class Counted(bytes):
    """A key that counts how often it is compared, and how many bytes of it are at most."""

    num_compared = num_bytes = 0

    def startswith(self, prefix: memoryview, start: int) -> bool:  # type: ignore[override]
        self.num_compared += 1
        self.num_bytes += len(prefix)
        return super().startswith(prefix, start)


@pytest.mark.parametrize("key_pages", [512, 700, 1024, 2000])
def test_what_a_comparison_costs_follows_what_is_common(key_pages: int) -> None:
    """Each of the two phases is a comparison for every doubling, and not one more byte than four times the common."""
    edge = ids(1024)
    for position in range(min(key_pages, 1024)):
        other = ids(2000)[:key_pages].copy()
        other[:1024] = edge[:key_pages]
        other[position] += 1
        key = Counted(other.tobytes())
        assert common_bytes(bytearray(edge.tobytes()), key, 0, 4) == 4 * position
        doublings = (position + 1).bit_length()
        assert key.num_compared <= 1 + 2 * doublings, position
        assert key.num_bytes - 4 * min(key_pages, 1024) <= 4 * 4 * (position + 1), position


def test_a_key_that_ends_inside_an_edge_matches_up_to_there() -> None:
    prompt = ids(40)
    tree = tree_of(prompt)
    assert look(tree, prompt[:-1]).pages.tolist() == list(range(9))


def test_keys_hold_whole_pages_only() -> None:
    tree = RadixTree(16, strategy())
    assert [len(tree.key(ids(count))) for count in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 64, 64, 64, 128]


def test_matching_changes_nothing() -> None:
    prompt = ids(40)
    tree = tree_of(prompt, np.concatenate((prompt[:20], ids(20, 1))))
    before = [(id(node), bytes(node.key), node.hits, node.last_used, node.locks) for node in every_node(tree)]
    tree.now = 99
    for end in range(41):
        look(tree, np.concatenate((prompt[:end], ids(9, 2))))
    look(tree, prompt, Namespace("other"))
    assert before == [(id(node), bytes(node.key), node.hits, node.last_used, node.locks) for node in every_node(tree)]
    assert list(tree._roots) == [SHARED]


def every_node(tree: RadixTree) -> list:
    nodes = list(tree._roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def test_siblings_may_share_tokens_but_not_a_page() -> None:
    first, second = ids(8), ids(8)
    second[2] += 1  # inside the first page
    tree = tree_of(first, second)
    assert look(tree, first).pages.tolist() == [0, 1]
    assert look(tree, second).pages.tolist() == [2, 3]
    assert tree.num_cached == 4


# ---- locks and sizes --------------------------------------------------------------------


def test_a_lock_splits_where_it_ends_and_protects_just_that() -> None:
    prompt = ids(40)
    tree = tree_of(prompt)
    handle = tree.lock(look(tree, prompt[:17]))
    tree.check()
    assert (handle.num_pages, tree.num_protected, tree.num_evictable) == (4, 4, 6)
    assert tree.pages(handle).tolist() == [0, 1, 2, 3]
    assert sorted(tree.evict(100).tolist()) == [4, 5, 6, 7, 8, 9]
    tree.check()
    tree.unlock(handle)
    assert (tree.num_protected, tree.num_evictable) == (0, 4)


def test_locks_of_several_requests_count_shared_pages_once() -> None:
    stem = ids(40)
    left, right = np.concatenate((stem, ids(20, 1))), np.concatenate((stem, ids(20, 2)))
    tree = tree_of(left, right)
    handles = [tree.lock(look(tree, tokens)) for tokens in (left, right, stem, stem[:8])]
    protected = [tree.num_protected]
    for handle in handles:
        tree.unlock(handle)
        tree.check()
        protected.append(tree.num_protected)
    assert protected == [20, 15, 10, 2, 0]


def test_a_handle_keeps_its_pages_when_its_edge_is_split() -> None:
    prompt = ids(40)
    tree = tree_of(prompt)
    handle = tree.lock(look(tree, prompt))
    other = tree.lock(look(tree, prompt[:13]))
    tree.check()
    assert tree.pages(handle).tolist() == list(range(10))
    tree.unlock(other)
    assert tree.evict(100).tolist() == []
    tree.unlock(handle)
    tree.check()


def test_a_match_from_before_a_change_is_made_anew() -> None:
    prompt = ids(40)
    tree = tree_of(prompt)
    old = look(tree, prompt)
    tree.evict(4)
    handle = tree.lock(old)
    assert handle.num_pages == 6
    tree.unlock(handle)
    tree.evict(100)
    handle = tree.lock(old)
    assert handle.num_pages == 0
    tree.check()


def test_a_match_from_before_a_split_is_made_anew() -> None:
    """Nothing came or went, but the edge in which the match ends is another now."""
    prompt = ids(40)
    tree = tree_of(prompt)
    old = look(tree, prompt[:17])
    other = tree.lock(look(tree, prompt[:9]))
    handle = tree.lock(old)
    tree.check()
    assert tree.pages(other).tolist() == [0, 1]
    assert tree.pages(handle).tolist() == [0, 1, 2, 3]
    assert handle.num_pages == 4


def test_a_match_outlives_the_root_it_found() -> None:
    prompt = ids(8)
    tree = RadixTree(4, strategy())
    handle = tree.lock(look(tree, prompt))
    seen = look(tree, prompt)
    tree.unlock(handle)
    late = tree.lock(seen)
    tree.publish(late, tree.key(prompt), pages_from(0, 2))
    tree.check()
    assert look(tree, prompt).num_pages == 2


def test_locking_a_path_stops_at_what_is_protected() -> None:
    prompt = ids(400)
    tree = tree_of(*(prompt[:end] for end in range(4, 404, 4)))  # a path of 100 nodes
    first = tree.lock(look(tree, prompt))
    top = next(iter(tree._roots[SHARED].children.values()))
    second = tree.lock(look(tree, prompt))
    assert top.locks == 1
    assert tree.num_protected == 100
    tree.unlock(first)
    assert tree.num_protected == 100
    tree.unlock(second)
    assert (tree.num_protected, top.locks) == (0, 0)


def test_unlocking_twice_is_a_bug() -> None:
    tree = tree_of(ids(8))
    handle = tree.lock(look(tree, ids(8)))
    tree.unlock(handle)
    with pytest.raises(AssertionError, match="twice"):
        tree.unlock(handle)


# ---- publishing -------------------------------------------------------------------------


def test_twins_in_one_step_end_on_the_same_pages() -> None:
    prompt = ids(40)
    tree = RadixTree(4, strategy())
    one, two = (tree.lock(look(tree, prompt)) for _ in range(2))
    first = tree.publish(one, tree.key(prompt), pages_from(0, 10))
    second = tree.publish(two, tree.key(prompt), pages_from(10, 10))
    tree.check()
    assert (first.pages.tolist(), first.duplicates.tolist()) == ([], [])
    assert (second.first, second.pages.tolist()) == (0, list(range(10)))
    assert second.duplicates.tolist() == list(range(10, 20))
    tree.unlock(one)
    assert tree.evict(100).tolist() == []
    tree.unlock(two)
    assert sorted(tree.evict(100).tolist()) == list(range(10))


def test_a_second_request_shares_chunks_while_the_first_still_runs() -> None:
    prompt = ids(41)
    tree = RadixTree(4, strategy())
    first = tree.lock(look(tree, prompt[:-1]))
    tree.publish(first, tree.key(prompt[:16]), pages_from(0, 4))
    second = tree.lock(look(tree, prompt[:-1]))
    assert tree.pages(second).tolist() == [0, 1, 2, 3]
    tree.publish(first, tree.key(prompt), pages_from(0, 10))
    rest = np.array([0, 1, 2, 3, 20, 21, 22, 23, 24, 25], dtype=np.int32)
    published = tree.publish(second, tree.key(prompt), rest)
    tree.check()
    assert (published.first, published.pages.tolist()) == (4, list(range(4, 10)))
    assert published.duplicates.tolist() == list(range(20, 26))


def test_chunks_of_one_request_are_one_node() -> None:
    prompt = ids(400)
    tree = RadixTree(4, strategy())
    handle = tree.lock(look(tree, prompt))
    for end in range(40, 440, 40):
        tree.publish(handle, tree.key(prompt[:end]), pages_from(0, end // 4))
        tree.check()
    assert len(every_node(tree)) == 2


def test_what_others_found_does_not_grow_in_place() -> None:
    prompt = ids(80)
    tree = tree_of(prompt[:40])
    handle = tree.lock(look(tree, prompt))
    tree.publish(handle, tree.key(prompt), pages_from(0, 20))
    assert len(every_node(tree)) == 3
    tree.check()


def test_publishing_less_than_a_page_changes_nothing() -> None:
    tree = RadixTree(16, strategy())
    handle = tree.lock(look(tree, ids(15)))
    published = tree.publish(handle, tree.key(ids(15)), pages_from(0, 0))
    assert len(published.pages) == len(published.duplicates) == tree.num_cached == 0
    tree.unlock(handle)
    assert not tree._roots


def test_a_key_of_another_prompt_is_refused() -> None:
    tree = tree_of(ids(8))
    handle = tree.lock(look(tree, ids(8)))
    with pytest.raises(AssertionError, match="continue"):
        tree.publish(handle, tree.key(ids(12, 1)), pages_from(0, 3))


def test_publishing_with_a_page_too_few_is_refused() -> None:
    tree = RadixTree(4, strategy())
    handle = tree.lock(look(tree, ids(8)))
    with pytest.raises(AssertionError, match="1 pages for a key of 32 bytes"):
        tree.publish(handle, tree.key(ids(8)), pages_from(0, 1))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_shared_prefix_is_split_off_at_the_last_whole_page(page_size: int, offset: int) -> None:
    stem = ids(3 * page_size + offset)
    prompts = [np.concatenate((stem, ids(2 * page_size, seed))) for seed in (1, 2, 3)]
    for index, prompt in enumerate(prompts):
        prompt[len(stem)] = index  # the tails differ at once
    tree = tree_of(*prompts, page_size=page_size)
    shared = len(stem) // page_size
    assert [look(tree, prompt).num_pages for prompt in prompts] == [len(prompt) // page_size for prompt in prompts]
    found = [look(tree, prompt).pages[:shared].tolist() for prompt in prompts]
    assert found == [list(range(shared))] * 3
    assert tree.num_cached == shared + sum(len(prompt) // page_size - shared for prompt in prompts)


# ---- namespaces and pairs ---------------------------------------------------------------


def test_namespaces_never_share() -> None:
    prompt = ids(40)
    spaces = [SHARED, Namespace("salt"), Namespace(adapter="salt"), Namespace("salt", "salt"), Namespace("sal", "t")]
    tree = RadixTree(4, strategy())
    for number, namespace in enumerate(spaces):
        assert look(tree, prompt, namespace).num_pages == 0
        insert(tree, tree.key(prompt), pages_from(10 * number, 10), namespace)
        tree.check()
    for number, namespace in enumerate(spaces):
        assert look(tree, prompt, namespace).pages.tolist() == list(range(10 * number, 10 * number + 10))


def test_a_namespace_is_forgotten_with_its_last_page() -> None:
    tree = RadixTree(4, strategy())
    for number in range(50):
        insert(tree, tree.key(ids(4)), pages_from(number, 1), Namespace(cache_salt=str(number)))
    assert len(tree._roots) == 50
    tree.evict(20)
    tree.check()
    assert len(tree._roots) == 30
    tree.evict(30)
    assert not tree._roots


def test_pairs_of_tokens_need_the_next_token_to_agree() -> None:
    prompt = ids(17)
    tree = tree_of(prompt, lookahead=1)
    assert tree.num_cached == 4
    other = prompt.copy()
    other[8] += 1
    assert look(tree, prompt).num_pages == 4
    # Token 8 is the second half of pair 7, so the second page differs although its own tokens do not.
    assert look(tree, other).num_pages == 1
    assert tree.key(ids(4)) == b""


# ---- house rules ------------------------------------------------------------------------


def test_the_tree_and_its_plugins_import_no_torch() -> None:
    code = (
        "import sys, engine.kv.radix, engine.plugins.manager as m\n"
        "m.Plugins({'eviction': 'slru'})\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_model_runs_at_a_page_size_of_64() -> None:
    model = CacheModel(64)
    request = model.admit(ids(700))
    model.compute(request, 600)
    model.publish(request)
    model.leave(request)
    model.check()
    assert model.tree.num_cached == 9
