"""Invariants that hold between the nodes of a radix tree after every operation.

Owns: checks that read nodes only.  Does not know: how the tree keeps them true.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from engine.kv.node import INDEX_BYTES, Node, Root, chained, page_indices


def check_nodes(root: Root, page_bytes: int) -> list[Node]:
    """Check links and shapes below a root; return all nodes below it, parents first."""
    assert root.parent is None
    assert not any((root.key, root.pages, root.host_pages, root.place)), "a root has pages"
    nodes = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    for node in (root, *nodes):
        for first, child in node.children.items():
            assert child.parent is node, "a child does not know its parent"
            assert child.first == first == child.key[:page_bytes], "a node is not listed under its first page"
        on_device = sum(bool(child.pages) for child in node.children.values())
        assert node.num_device_children == on_device, (
            f"{node.num_device_children} device children counted of {on_device}"
        )
    for node in nodes:
        assert node.key, "an edge is empty"
        assert len(node.key) % page_bytes == 0, f"an edge of {len(node.key)} bytes is no whole number of pages"
        num_pages = len(node.key) // page_bytes
        assert node.num_pages in (0, num_pages), f"{node.num_pages} device pages for {num_pages} of key"
        assert node.num_host_pages in (0, num_pages), f"{node.num_host_pages} host pages for {num_pages} of key"
        assert node.pages or node.host_pages, "a node is in no tier"
        assert node.hashes is None or len(node.hashes) <= num_pages, "a node has more hashes than pages"
        above = node.parent
        assert above is not None
        assert above is root or above.pages or not node.pages, "a node is on the device and what it continues is not"
        _check_hashes(node)
    return nodes


def _check_hashes(node: Node) -> None:
    if node.hashes:
        assert node.parent is not None
        page_bytes = len(node.first)
        key = bytes(node.key[: len(node.hashes) * page_bytes])
        expected = _hashes_of(node.parent.page_hashes[-1], key, page_bytes)
        assert expected == node.hashes, "hashes do not match the keys"


@lru_cache(maxsize=1024)
def _hashes_of(parent: bytes, key: bytes, page_bytes: int) -> list[bytes]:
    """Return the hashes of a key.  They are cached, since the same edges are checked after every operation."""
    return [*chained(parent, key, page_bytes)]


def check_locks(nodes: Sequence[Node], num_handles: int) -> None:
    """Check that locks are the handles that end in a node, plus its protected children."""
    own = [node.locks - sum(bool(child.locks) for child in node.children.values()) for node in nodes]
    assert min(own, default=0) >= 0, "a child is protected and its parent is not"
    assert sum(own) == num_handles, f"{sum(own)} locks for {num_handles} handles"


def check_pages(nodes: Sequence[Node]) -> None:
    """Check that each device page is in one node."""
    raw = b"".join(node.pages for node in nodes)
    assert len(np.unique(page_indices(raw))) * INDEX_BYTES == len(raw), "a page is in two nodes"
    for node in nodes:
        # A locked node must be on the device; a candidate's time of last use must cover that of evicted children.
        assert not node.locks or node.pages, "a node without device pages is locked"
        for child in node.children.values():
            if node.pages and not node.num_device_children:
                assert node.last_used >= child.last_used, "a use of an evicted child was not handed up"
