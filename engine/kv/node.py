"""A node of the radix tree: the key of one edge, the pages that hold it, and the data that eviction strategies read.

Owns: its fields and how they are split in two; the hashes of its pages; a request's handle on a node.
Does not know: sizes, queues, other nodes but parent and children.
Keys and page indices are int32s in bytearrays: slices compare and join in C, a tail is cut off or appended in place.

Chained hashes name cached pages the same way in every process: hash(page) = SHA-256(hash(page before) + the page's
tokens).  The namespace's seed takes the place of the hash before the first page.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.kv.pages import Pages

INDEX_BYTES = 4  # a page index is an int32


class Namespace(NamedTuple):
    """A set of requests that may share pages: only keys of equal namespaces are compared.

    cache_salt: a tenant's secret, empty for the pages that all share.
    adapter: digest of the adapter that the K/V were computed with, empty for none."""

    cache_salt: str = ""
    adapter: str = ""


SHARED = Namespace()


class Node:
    """An edge of whole pages and its end.  A root has no parent and an empty key.

    key: the tokens.  first: the key's first page, the name of this node among its siblings.
    pages, host_pages: page indices in either tier, as many as the key has pages, or none.
    locks: handles that end here, plus children whose own ``locks`` is not 0; so 0 means that no request needs them.
    num_device_children: children with pages on the device; only a node without any may be evicted.
    place: the node's entry in the queue of candidates, None if it is in none.
    hashes: chained hash per page, as far as they were needed; a root has one, the seed of its namespace.
    created, last_used: steps.  hits: requests that found a prefix here.  priority: most urgent user (lower is more).
    The last three leave out the descendants.  A child that leaves hands its own up, so they are exact in a candidate.
    """

    __slots__ = (
        "children", "created", "first", "hashes", "hits", "host_pages", "key", "last_used", "locks",
        "num_device_children", "pages", "parent", "place", "priority",
    )  # fmt: skip

    def __init__(
        self, parent: "Node | None", first: bytes, key: bytearray, pages: bytearray, now: int, priority: int
    ) -> None:
        self.parent = parent
        self.first = first
        self.key = key
        self.pages = pages
        self.host_pages = bytearray()
        self.children: dict[bytes, Node] = {}
        self.num_device_children = 0
        self.locks = 0
        self.place: tuple[object, ...] | None = None
        self.hashes: list[bytes] | None = None
        self.created = self.last_used = now
        self.hits = 0
        self.priority = priority

    @property
    def num_pages(self) -> int:
        """Number of pages on the device."""
        return len(self.pages) // INDEX_BYTES

    @property
    def num_host_pages(self) -> int:
        """Number of pages on the host."""
        return len(self.host_pages) // INDEX_BYTES

    @property
    def page_hashes(self) -> list[bytes]:
        """The chained hash of each page, computed when first read; a root has its seed.  Do not change the list."""
        unfinished: list[Node] = []
        above = self
        while above.parent is not None and len(above.hashes or ()) * len(above.first) < len(above.key):
            unfinished.append(above)
            above = above.parent
        if isinstance(above, Root) and above.hashes is None:
            above.hashes = [namespace_seed(above.namespace)]
        assert above.hashes
        previous = above.hashes[-1]
        for below in reversed(unfinished):
            hashes = below.hashes = below.hashes or []
            previous = hashes[-1] if hashes else previous
            page_bytes = len(below.first)
            hashes += chained(previous, bytes(below.key[len(hashes) * page_bytes :]), page_bytes)
            previous = hashes[-1]
        return self.hashes or []

    def inherit(self, child: "Node") -> None:
        """Take over the uses of a child that leaves: each of them passed through this node."""
        self.hits += child.hits
        child.hits = 0
        self.last_used = max(self.last_used, child.last_used)
        self.priority = min(self.priority, child.priority)

    def split(self, num_pages: int) -> "Node":
        """Split the edge after ``num_pages`` and return the new node for the part before; costs the length of the rest.

        This node keeps its end, and with it the handles that end there, its children and its place in a queue.
        """
        parent = self.parent
        assert parent is not None
        page_bytes = len(self.first)
        key, pages, host_pages = self.key, self.pages, self.host_pages
        cut, index_cut = num_pages * page_bytes, num_pages * INDEX_BYTES
        self.key, self.pages, self.host_pages = key[cut:], pages[index_cut:], host_pages[index_cut:]
        del key[cut:], pages[index_cut:], host_pages[index_cut:]
        above = Node(parent, self.first, key, pages, self.created, self.priority)
        above.host_pages = host_pages
        above.last_used = self.last_used
        above.locks = 1 if self.locks else 0
        above.num_device_children = 1 if pages else 0
        if self.hashes is not None:
            above.hashes, self.hashes = self.hashes[:num_pages], self.hashes[num_pages:]
        parent.children[above.first] = above
        self.parent = above
        self.first = bytes(self.key[:page_bytes])
        above.children[self.first] = self
        return above


class Root(Node):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", bytearray(), bytearray(), 0, 0)
        self.namespace = namespace


def page_indices(raw: bytes | bytearray) -> Pages:
    """Return page indices from a copy of a node's bytes: a bytearray with a numpy view could not be resized."""
    return np.frombuffer(bytes(raw), dtype=np.int32)


def namespace_seed(namespace: Namespace) -> bytes:
    """Return the hash before a namespace's first page.  Lengths keep ("ab", "c") apart from ("a", "bc")."""
    parts = [part.encode("utf-8", "surrogatepass") for part in namespace]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def chained(parent: bytes, key: bytes, page_bytes: int) -> Iterator[bytes]:
    """Yield the hash of each page of ``key``.  parent: the hash before the first."""
    for start in range(0, len(key), page_bytes):
        digest = hashlib.sha256(parent)
        digest.update(key[start : start + page_bytes])
        yield (parent := digest.digest())


NO_PAGES: Pages = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Handle:
    """One request's lock.  num_pages: length of the prefix it keeps in the tree.  node: its end, None once unlocked.

    is_sealed: the request computes no more pages that another one may use."""

    node: Node | None
    num_pages: int
    priority: int
    is_sealed: bool = False


@dataclass(slots=True, eq=False)
class Published:
    """The tree's pages that replace a request's own.

    pages: must replace the request's pages from index ``first`` on.  duplicates: the replaced pages, to be freed."""

    first: int
    pages: Pages
    duplicates: Pages
