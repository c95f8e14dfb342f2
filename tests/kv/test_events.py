"""Events and the hashes that name pages in them."""

import hashlib

import numpy as np
import pytest

from engine.kv.events import KVEvent
from engine.kv.node import SHARED, Namespace, namespace_seed
from engine.kv.radix import RadixTree
from tests.kv.cache_model import CacheModel, strategy
from tests.kv.inserting import insert
from tests.kv.operations import NAMES, Operations


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 17, count).astype(np.int32)


def pages_from(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def chain(tokens: np.ndarray, page_size: int, namespace: Namespace = SHARED) -> list[bytes]:
    """Hashes of whole pages, the slow way."""
    hashes = [namespace_seed(namespace)]
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        hashes.append(hashlib.sha256(hashes[-1] + tokens[start : start + page_size].tobytes()).digest())
    return hashes[1:]


def test_stored_names_pages_and_what_they_continue() -> None:
    prompt = ids(42)
    tree = RadixTree(4, strategy(), record_events=True)
    insert(tree, tree.key(prompt[:20]), pages_from(0, 5))
    insert(tree, tree.key(prompt), pages_from(10, 10))
    first, second = tree.drain_events()
    hashes = chain(prompt, 4)
    assert first == KVEvent(
        "stored", "device", SHARED, namespace_seed(SHARED), tuple(hashes[:5]), prompt[:20].tobytes()
    )
    assert second == KVEvent("stored", "device", SHARED, hashes[4], tuple(hashes[5:]), prompt[20:40].tobytes())
    assert tree.drain_events() == []


def test_chunks_that_grow_in_place_name_only_what_is_new() -> None:
    prompt = ids(40)
    tree = RadixTree(4, strategy(), record_events=True)
    handle = tree.lock(tree.match(tree.key(prompt)))
    for end in (12, 24, 40):
        tree.publish(handle, tree.key(prompt[:end]), pages_from(0, end // 4))
    hashes = chain(prompt, 4)
    assert [event.hashes for event in tree.drain_events()] == [tuple(hashes[:3]), tuple(hashes[3:6]), tuple(hashes[6:])]


def test_namespaces_give_the_same_tokens_other_names() -> None:
    spaces = [Namespace("ab", "c"), Namespace("a", "bc"), Namespace(), Namespace(adapter="abc")]
    assert len({chain(ids(4), 4, namespace)[0] for namespace in spaces}) == 4


def test_nothing_is_hashed_unless_somebody_listens() -> None:
    tree = RadixTree(4, strategy())
    insert(tree, tree.key(ids(40)), pages_from(0, 10))
    tree.evict(3)
    assert tree.drain_events() == []
    assert all(node.hashes is None for node in tree._lock_counts.candidates())


@pytest.mark.parametrize("num_host_pages", [0, 20])
def test_a_listener_always_knows_what_is_cached(num_host_pages: int) -> None:
    rng = np.random.default_rng(3)
    model = CacheModel(4, num_pages=24, num_host_pages=num_host_pages)
    operations = Operations(model)
    known: dict[str, set[bytes]] = {"device": set(), "host": set()}
    kinds = set()
    for _ in range(600):
        getattr(operations, NAMES[rng.integers(len(NAMES))])(lambda below: int(rng.integers(below)))
        for event in model.tree.drain_events():
            kinds.add((event.kind, event.tier))
            hashes = set(event.hashes)
            assert event.parent in {namespace_seed(event.namespace)} | known["device"] | known["host"]
            if event.kind == "removed":
                assert hashes <= known[event.tier]
                known[event.tier] -= hashes
            else:
                assert not hashes & known[event.tier]
                known[event.tier] |= hashes
        expected: dict[str, set[bytes]] = {"device": set(), "host": set()}
        for node, (namespace, elements) in model.nodes():
            hashes = set(chain(np.array(elements, dtype=np.int32), 4, namespace)[-(len(node.key) // 16) :])
            expected["device"] |= hashes if node.pages else set()
            expected["host"] |= hashes if node.host_pages else set()
        assert known == expected
    assert len(kinds) == (5 if num_host_pages else 2)
