"""Eviction: the strategy, the queue of candidates in its order, and the locks that protect nodes from it.

Owns: ``locks`` and ``place`` of every node, the number of evictable and of protected pages.
Does not know: keys, requests, the host, time.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from engine.kv.node import INDEX_BYTES, Node

CHUNK = 256  # A full chunk has twice as many entries: 4 KB of pointers to move at most, well below a microsecond.

SortKey = tuple[int, ...]
Entry = tuple[object, ...]


class Candidate(Protocol):
    """A part of a cached prefix that no request uses and that no other pages on the device continue.

    created, last_used: steps.  hits: requests that found their prefix here, or further on.
    priority: priority of its most urgent user so far, lower is more urgent.
    num_pages: number of pages that evicting all of it frees.
    page_hashes: names of its pages, the same in every process: the chained SHA-256 of all tokens up to the page's end,
    as in ``KVEvent``.  Pages that are evicted and computed again have the same hash.  A hash takes about 1 us per page
    when it is first read; then the tree keeps it."""

    @property
    def created(self) -> int: ...
    @property
    def last_used(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_hashes(self) -> Sequence[bytes]: ...


@runtime_checkable
class EvictionStrategy(Protocol):
    """The order in which candidates are evicted."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Return the rank of a candidate: the smallest goes first, and the earliest candidate among equals.

        Always return the same number of ints.  It is called whenever a node becomes a candidate; while the node is one,
        only its num_pages changes.  With a host tier it also ranks the prefixes that are there alone.
        If it raises or returns anything else, that is logged with the plugin's name, and it is not called again.
        """
        ...


@runtime_checkable
class EvictionListener(Protocol):
    """A strategy that is also called with each eviction, so that it can recognise pages that come back."""

    def evicted(self, candidate: Candidate) -> None:
        """Called when all pages of a candidate leave the device.

        If fewer pages were needed than it had, it is a part of the ranked candidate, and the rest may be ranked next.
        It is not called if every page is lost with a failed device.
        If it raises, that is logged with the plugin's name, and it is not called again."""
        ...


class EvictionQueue:
    """The candidates in order: a sorted list, cut into chunks.

    Adding, removing and looking at the first cost O(log n) comparisons and the move of one chunk's pointers.  A binary
    heap would be as fast but cannot remove: entries of nodes that got locked again would pile up, and the eviction that
    must skip them would stall a step.
    """

    def __init__(self, rank: Callable[[Node], SortKey]) -> None:
        self._rank = rank
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []
        self._num_added = 0

    def first(self) -> Node | None:
        """Return the node that goes next; None if there is no candidate."""
        if not self._chunks:
            return None
        node = self._chunks[0][0][-1]
        assert isinstance(node, Node)
        return node

    def add(self, node: Node) -> None:
        """Insert a node by its rank."""
        self._num_added += 1
        # The serial number decides among equal ranks, so that nodes are never compared.
        entry = node.place = (*self._rank(node), self._num_added, node)
        lasts = self._lasts
        if not lasts:
            self._chunks.append([entry])
            lasts.append(entry)
            return
        if entry > lasts[-1]:
            index = len(lasts) - 1
            chunk = self._chunks[index]
            chunk.append(entry)
            lasts[index] = entry
        else:
            index = bisect_left(lasts, entry)
            chunk = self._chunks[index]
            insort(chunk, entry)
        if len(chunk) > 2 * CHUNK:
            self._chunks.insert(index + 1, chunk[CHUNK:])
            del chunk[CHUNK:]
            lasts.insert(index, chunk[-1])

    def remove(self, node: Node) -> None:
        """Remove a node from any place in the queue."""
        entry = node.place
        assert entry is not None, "the node is no candidate"
        node.place = None
        index = bisect_left(self._lasts, entry)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, entry)]
        if not chunk:
            del self._chunks[index], self._lasts[index]
        elif len(chunk) < CHUNK // 4 and index + 1 < len(self._chunks) and len(self._chunks[index + 1]) < CHUNK:
            # Small neighbours are joined, or a few entries that never leave would each keep a chunk.
            self._chunks[index] = chunk + self._chunks.pop(index + 1)
            del self._lasts[index]
        else:
            self._lasts[index] = chunk[-1]

    def nodes(self) -> list[Node]:
        """Return all candidates, the next to go first."""
        return [node for chunk in self._chunks for entry in chunk if isinstance(node := entry[-1], Node)]

    def check(self) -> None:
        """Raise AssertionError unless entries are in order and every node has its own entry."""
        entries = [entry for chunk in self._chunks for entry in chunk]
        assert entries == sorted(entries), "the queue is out of order"
        assert self._lasts == [chunk[-1] for chunk in self._chunks], "a chunk's last entry is not the one noted"
        for entry, node in zip(entries, self.nodes(), strict=True):
            assert node.place is entry, "a node does not know its place in the queue"


class LockCounts:
    """The locks on nodes, and the number of pages that they keep on the device.

    Leaves go first, so a lock on a node protects the whole path above it.  ``locks`` counts handles and protected
    children, so a walk up ends at the first node that was protected before: the sizes stay exact, and a lock
    below a shared prompt costs only the request's own part of the path.
    num_evictable, num_protected: pages on the device that no handle keeps, and pages that some handle keeps."""

    def __init__(self, strategy: EvictionStrategy) -> None:
        self.num_evictable = 0
        self.num_protected = 0
        self._queue = EvictionQueue(strategy.rank)
        self._evicted = strategy.evicted if isinstance(strategy, EvictionListener) else None

    def protect(self, end: Node) -> None:
        """Add a lock to ``end``, which protects the path to it."""
        if end.place is not None:
            self._queue.remove(end)
        num_bytes = 0
        node: Node | None = end
        while node is not None:
            node.locks += 1
            if node.locks > 1:
                break
            num_bytes += len(node.pages)
            node = node.parent
        num_pages = num_bytes // INDEX_BYTES
        self.num_evictable -= num_pages
        self.num_protected += num_pages

    def release(self, end: Node) -> None:
        """Remove a lock from ``end``."""
        num_bytes = 0
        node: Node | None = end
        while node is not None:
            node.locks -= 1
            if node.locks:
                break
            num_bytes += len(node.pages)
            node = node.parent
        num_pages = num_bytes // INDEX_BYTES
        self.num_evictable += num_pages
        self.num_protected -= num_pages
        self.settle(end)

    def arrive(self, node: Node) -> None:
        """Count the pages that an unprotected node has got; it must be protected before it can be a candidate."""
        parent = node.parent
        assert parent is not None
        parent.num_device_children += 1
        if parent.place is not None:
            self._queue.remove(parent)
        self.num_evictable += node.num_pages

    def grow(self, node: Node, num_pages: int) -> None:
        """Count the new pages of a protected node."""
        assert node.locks, "only a protected node can grow"
        self.num_protected += num_pages

    def settle(self, node: Node) -> None:
        """Make a node that lost a lock or a child a candidate, if it may be one now."""
        if not node.locks and not node.num_device_children and node.parent is not None:
            self._queue.add(node)

    def worst(self) -> Node:
        """Return the candidate that goes next; the caller has checked ``num_evictable``."""
        node = self._queue.first()
        assert node is not None, f"{self.num_evictable} pages are counted as evictable and no node has them"
        return node

    def leave(self, node: Node) -> None:
        """Remove a candidate, whose pages are taken away.  Call ``settle`` for its parent after that."""
        parent = node.parent
        assert parent is not None
        if self._evicted is not None:
            self._evicted(node)
        self._queue.remove(node)
        self.num_evictable -= node.num_pages
        parent.num_device_children -= 1
        parent.inherit(node)

    def candidates(self) -> list[Node]:
        """Return all candidates, the next to go first."""
        return self._queue.nodes()

    def check(self, nodes: list[Node]) -> None:
        """Raise AssertionError unless sizes and candidates match ``nodes``, which are all nodes of the tree."""
        self._queue.check()
        evictable = sum(node.num_pages for node in nodes if not node.locks)
        protected = sum(node.num_pages for node in nodes if node.locks)
        assert self.num_evictable == evictable, (
            f"{self.num_evictable} pages counted as evictable, there are {evictable}"
        )
        assert self.num_protected == protected, (
            f"{self.num_protected} pages counted as protected, there are {protected}"
        )
        expected = {id(node) for node in nodes if node.pages and not node.locks and not node.num_device_children}
        candidates = {id(node) for node in self.candidates()}
        assert candidates == expected, f"{len(candidates)} candidates, there should be {len(expected)} others or more"
