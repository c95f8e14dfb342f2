"""Who needs which pages on the device: locks, the two sizes they make, and the candidates for eviction.

Owns: ``locks`` and ``place`` of every node, both sizes.  Does not know: keys, requests, the host.
Leaves go first, so a lock on a node protects the whole path above it.  ``locks`` counts children that are protected
along with handles, so a walk up ends at the first node that was protected anyway: the sizes stay exact and a lock below
a shared prompt costs the request's own part of the path.
"""

from engine.kv.eviction import EvictionQueue, EvictionStrategy
from engine.kv.node import INDEX_BYTES, Node


class LockCounts:
    """num_evictable, num_protected: pages on the device that nobody needs, and that some handle keeps."""

    def __init__(self, strategy: EvictionStrategy) -> None:
        self.num_evictable = 0
        self.num_protected = 0
        self._queue = EvictionQueue(strategy.rank)

    def protect(self, end: Node) -> None:
        """One more reason to keep the path to ``end``."""
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
        """One reason less."""
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
        """A node that nobody keeps yet got its pages; something does before it may become a candidate."""
        parent = node.parent
        assert parent is not None
        parent.num_device_children += 1
        if parent.place is not None:
            self._queue.remove(parent)
        self.num_evictable += node.num_pages

    def grow(self, node: Node, num_pages: int) -> None:
        """A protected node got more pages."""
        assert node.locks, "only what a request keeps can grow"
        self.num_protected += num_pages

    def settle(self, node: Node) -> None:
        """A node that lost a lock or a child may be a candidate now."""
        if not node.locks and not node.num_device_children and node.parent is not None:
            self._queue.add(node)

    def worst(self) -> Node:
        """The candidate that goes next; the caller has looked at ``num_evictable``."""
        node = self._queue.first()
        assert node is not None, f"{self.num_evictable} pages are counted as evictable and no node has them"
        return node

    def leave(self, node: Node) -> None:
        """A candidate's pages are taken away; its parent may be the next candidate, see ``settle``."""
        parent = node.parent
        assert parent is not None
        self._queue.remove(node)
        self.num_evictable -= node.num_pages
        parent.num_device_children -= 1
        parent.inherit(node)

    def candidates(self) -> list[Node]:
        """All candidates, the next to go first."""
        return self._queue.nodes()

    def check(self, nodes: list[Node]) -> None:
        """Raise AssertionError unless sizes and candidates are what ``nodes``, all that the tree has, make them."""
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
