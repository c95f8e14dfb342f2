"""The radix tree: which pages already hold a token prefix, which of them are in use, and which go when pages run out.

Owns: every page published to it until ``evict`` hands it back.  Does not know: requests, rows, tensors, wall time.
Invariant (``check``): each page is in one node; num_cached = num_evictable + num_protected; only whole pages.

A request's way through it, with ``key = tree.key(tokens)``:

    match(key)            how much is cached; changes nothing      lock(match)       the pages stay from now on
    publish(handle, ...)  after every chunk and at the end         unlock(handle)    the pages may go again
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.kv.events import EventLog, KVEvent
from engine.kv.eviction import EvictionStrategy, LockCounts
from engine.kv.invariants import check_locks, check_nodes, check_pages
from engine.kv.match import Match, common_bytes, match_on_device
from engine.kv.node import NO_PAGES, SHARED, Handle, Namespace, Node, Published, Root
from engine.kv.outline import Outline, outline
from engine.kv.pages import Pages

TOKEN_BYTES = 4


class RadixTree:
    """A prefix tree per namespace over one pool of pages.

    now: the step that is being planned; set it before each.
    lookahead: 1 if K/V depend on the next token too; a key's elements are pairs of neighbours then.
    record_events: collect the events that ``drain_events`` returns, which must be called then.
    num_handles: number of handles that are locked.
    new_pages: called with a node, the index of its first new page, and these.  new_state: with a node and a slot.
    A feature may use a subclass, which keeps pages that are evicted, or states behind them."""

    def __init__(
        self, page_size: int, strategy: EvictionStrategy, *, lookahead: int = 0, record_events: bool = False
    ) -> None:
        self.page_size = page_size
        self.now = self._version = 0
        self._stride = 1 + lookahead
        self.page_bytes = page_size * TOKEN_BYTES * self._stride
        self._strategy = strategy
        self._events = EventLog(self.page_bytes, stride=self._stride) if record_events else None
        self.new_pages: Callable[[Node, int, Pages], None] | None = None
        self.new_state: Callable[[Node, int], None] | None = None
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[Namespace, Root] = {}
        self._lock_counts = LockCounts(self._strategy)
        self.num_handles = 0

    @property
    def num_evictable(self) -> int:
        """Number of pages that ``evict`` can return."""
        return self._lock_counts.num_evictable

    @property
    def num_protected(self) -> int:
        """Number of pages that some handle keeps."""
        return self._lock_counts.num_protected

    @property
    def num_cached(self) -> int:
        """Number of pages that the tree owns."""
        return self._lock_counts.num_evictable + self._lock_counts.num_protected

    # ---- look-ups ---------------------------------------------------------------------------

    def key(self, tokens: npt.NDArray[np.int32]) -> bytes:
        """Return the key of the whole pages of ``tokens``.  Without a prompt's last token, one is left to compute."""
        if self._stride > 1:
            tokens = np.stack((tokens[:-1], tokens[1:]), axis=1)
        raw = tokens.tobytes()
        return raw[: len(raw) // self.page_bytes * self.page_bytes]

    def match(self, key: bytes, namespace: Namespace = SHARED) -> Match:
        """Find the longest cached prefix.  Changes nothing."""
        match = Match(key, namespace, self._version)
        root = self._roots.get(namespace)
        if root is not None:
            match_on_device(match, root, self.page_bytes)
        return match

    def pages(self, handle: Handle) -> Pages:
        """Return the pages that a handle keeps, in order."""
        parts: list[bytearray] = []
        node = handle.node
        while node is not None:
            parts.append(node.pages)
            node = node.parent
        return np.frombuffer(b"".join(reversed(parts)), dtype=np.int32)

    # ---- a request's way --------------------------------------------------------------------

    def lock(self, match: Match, priority: int = 0) -> Handle:
        """Keep the matched pages on the device until ``unlock``.  If the tree has changed, the key is matched again.

        priority: priority of the request, for strategies that read it; lower is more urgent."""
        if match.version != self._version:
            match = self.match(match.key, match.namespace)
        node = match.end
        if node is None:
            node = self._roots.setdefault(match.namespace, Root(match.namespace))
        elif match.num_end_pages * self.page_bytes < len(node.key):
            node = self._split(node, match.num_end_pages)
        node.hits += 1
        self.num_handles += 1
        self._lock_counts.protect(node)
        handle = Handle(node, match.num_pages, priority)
        self._stamp(handle, node)
        return handle

    def publish(self, handle: Handle, key: bytes, pages: Pages) -> Published:
        """Give the tree the pages of ``key`` that it does not have, and move the lock to the key's end.

        key: the tokens computed so far; it begins with what the handle keeps.  pages: the request's, one for each
        page of the key.  After that the request owns none of these: it uses the tree's, as ``Published`` lists them.
        """
        start = handle.num_pages
        assert len(key) == len(pages) * self.page_bytes, f"{len(pages)} pages for a key of {len(key)} bytes"
        node, at, found = self._descend(handle, key)
        if at < len(key):
            node = self._extend(handle, node, key[at:], pages[at // self.page_bytes :])
        self._move(handle, node, len(pages))
        if not found:
            return Published(start, NO_PAGES, NO_PAGES)
        survivors = np.frombuffer(b"".join(found), dtype=np.int32)
        return Published(start, survivors, pages[start : start + len(survivors)])

    def unlock(self, handle: Handle) -> None:
        """Unlock a handle: its request no longer needs the pages, and the tree keeps them for others."""
        node = handle.node
        assert node is not None, "a handle was unlocked twice"
        self._stamp(handle, node)
        handle.node = None
        self.num_handles -= 1
        self._lock_counts.release(node)
        self._settle_root(node)

    def evict(self, count: int) -> Pages:
        """Take ``count`` pages out of the tree, the worst candidates' first, or all evictable ones if those are fewer.

        The last leaf only loses its tail."""
        freed: list[bytes] = []
        missing = min(count, self._lock_counts.num_evictable)
        while missing > 0:
            node = self._lock_counts.worst()
            if node.num_pages > missing:
                self._split(node, node.num_pages - missing)
            missing -= node.num_pages
            freed.append(bytes(node.pages))
            self._lose_pages(node)
        return np.frombuffer(b"".join(freed), dtype=np.int32)

    def forget(self) -> None:
        """Empty the tree: the content of all pages is lost, and every handle is void.  The caller frees the pages."""
        if self._events is not None:
            for node in self._all_nodes():
                if node.pages:
                    self._events.removed(node, "device")
        self._version += 1
        self._clear()

    # ---- output -----------------------------------------------------------------------------

    def drain_events(self) -> list[KVEvent]:
        """Return the events since the last call; none unless ``record_events``."""
        return self._events.drain() if self._events is not None else []

    def outline(self, max_nodes: int, holders: Pages | None = None) -> Outline:
        """Return a picture of the most used part, at a bounded cost.  holders: as in ``engine/kv/outline.py``."""
        return outline(reversed(self._roots.values()), self.now, max_nodes, holders, stride=self._stride)

    # ---- internals --------------------------------------------------------------------------

    def _descend(self, handle: Handle, key: bytes) -> tuple[Node, int, list[bytearray]]:
        """Walk from a handle's end along ``key`` as far as the tree has pages, splitting the node where they differ.

        Return the end, its position in the key, and the pages on the way."""
        node = handle.node
        assert node is not None, "a handle was used after its unlock"
        page_bytes = self.page_bytes
        at = handle.num_pages * page_bytes
        assert key.startswith(node.key, at - len(node.key)), "the key does not continue what the handle keeps"
        found: list[bytearray] = []
        while (child := node.children.get(key[at : at + page_bytes])) is not None and child.pages:
            node = self._split_at(child, key, at)
            found.append(node.pages)
            at += len(node.key)
        return node, at, found

    def _split_at(self, node: Node, key: bytes, at: int) -> Node:
        """Return the part of a node that agrees with ``key`` from ``at`` on; it is split if that is not all of it."""
        if key.startswith(node.key, at):
            return node
        return self._split(node, common_bytes(node.key, key, at, self.page_bytes) // self.page_bytes)

    def _extend(self, handle: Handle, node: Node, tail: bytes, pages: Pages) -> Node:
        """Add ``tail`` below ``node``.  Return the node it ends in."""
        self._version += 1
        raw = bytearray(pages.tobytes())
        if self._may_grow(node, handle):
            first_page = node.num_pages
            node.key += tail
            node.pages += raw
            self._lock_counts.grow(node, len(pages))
        else:
            first_page, parent = 0, node
            node = Node(parent, tail[: self.page_bytes], bytearray(tail), raw, self.now, handle.priority)
            parent.children[node.first] = node
            self._lock_counts.arrive(node)
        if self._events is not None:
            self._events.stored(node, "device", first_page)
        if self.new_pages is not None:
            self.new_pages(node, first_page, pages)
        return node

    def _may_grow(self, node: Node, handle: Handle) -> bool:
        """Return whether only this request ever used a node: a prompt in twenty chunks is one node, not twenty."""
        own = node is handle.node and node.locks == 1 and not node.hits and not node.children
        return own and node.parent is not None and node.priority == handle.priority

    def _move(self, handle: Handle, node: Node, num_pages: int) -> None:
        """Move a lock to another node.  The new end is locked first, so that no page is unlocked in between."""
        old = handle.node
        if old is not None and old is not node:
            self._lock_counts.protect(node)
            self._lock_counts.release(old)
        handle.node, handle.num_pages = node, num_pages
        self._stamp(handle, node)

    def _stamp(self, handle: Handle, end: Node) -> None:
        """Note a use at its end only: the nodes above get it when the end leaves, before it is read there."""
        end.last_used = self.now
        end.priority = min(end.priority, handle.priority)

    def _split(self, node: Node, num_pages: int) -> Node:
        self._version += 1
        return node.split(num_pages)

    def _lose_pages(self, node: Node) -> None:
        """Take a candidate's pages away."""
        self._version += 1
        parent = node.parent
        assert parent is not None
        if self._events is not None:
            self._events.removed(node, "device")
        self._lock_counts.leave(node)
        self._drop(node)
        self._lock_counts.settle(parent)

    def _drop(self, node: Node) -> None:
        """Remove a node whose pages will be used for other content."""
        self._detach(node)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.first]
        self._settle_root(parent)

    def _settle_root(self, node: Node) -> None:
        """Forget a namespace if nothing of it is left."""
        if isinstance(node, Root) and not node.locks and not node.children:
            self._version += 1
            del self._roots[node.namespace]

    def _all_nodes(self) -> list[Node]:
        """Return the nodes below the roots, the furthest from them first."""
        nodes: list[Node] = [child for root in self._roots.values() for child in root.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes[::-1]

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; walks the whole tree."""
        nodes: list[Node] = []
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, f"{namespace}: a root of another namespace"
            assert root.children or root.locks, f"{namespace}: an empty root"
            nodes += check_nodes(root, self.page_bytes)
        roots = list(self._roots.values())
        check_locks([*roots, *nodes], self.num_handles)
        check_pages(nodes)
        self._check_contents(nodes)
        self._lock_counts.check(nodes)

    def _check_contents(self, nodes: list[Node]) -> None:
        assert all(node.pages for node in nodes), "a node has no pages"
