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
from engine.kv.host_tier import HostTier, Transfer
from engine.kv.invariants import check_locks, check_nodes, check_pages
from engine.kv.match import Match, common_bytes, match_on_device, match_on_host
from engine.kv.node import NO_PAGES, SHARED, Handle, Namespace, Node, Published, Root, namespace_seed
from engine.kv.outline import Outline, outline
from engine.kv.pages import Pages

TOKEN_BYTES = 4


class RadixTree:
    """A prefix tree per namespace over one pool of pages.

    now: the step that is being planned; set it before each.
    bigram: a key's elements are pairs of neighbours, for EAGLE heads, whose K/V depend on the next token too.
    num_host_pages: size of the host tier, 0 for none.
    record_events: collect the events that ``drain_events`` returns, which must be called then.
    new_pages: called with the pages that a request gives the tree: their node, index of the first in it, the pages.
    """

    def __init__(
        self,
        page_size: int,
        strategy: EvictionStrategy,
        *,
        bigram: bool = False,
        num_host_pages: int = 0,
        record_events: bool = False,
    ) -> None:
        self.page_size = page_size
        self.now = 0
        self._bigram = bigram
        self.page_bytes = page_size * TOKEN_BYTES * (2 if bigram else 1)
        self._strategy = strategy
        self._num_host_pages = num_host_pages
        self._events = EventLog(self.page_bytes, bigram=bigram) if record_events else None
        self.new_pages: Callable[[Node, int, Pages], None] | None = None
        self._version = 0
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[Namespace, Root] = {}
        self._lock_counts = LockCounts(self._strategy)
        self._host = HostTier(self._num_host_pages, self._detach, self._events) if self._num_host_pages else None
        self._num_handles = 0

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

    @property
    def num_handles(self) -> int:
        """Number of handles that are locked."""
        return self._num_handles

    @property
    def num_on_host(self) -> int:
        """Number of host pages in use."""
        return self._host.num_used if self._host is not None else 0

    # ---- look-ups ---------------------------------------------------------------------------

    def key(self, tokens: npt.NDArray[np.int32]) -> bytes:
        """Return the key of the whole pages of ``tokens``.  Without a prompt's last token, one is left to compute."""
        if self._bigram:
            tokens = np.stack((tokens[:-1], tokens[1:]), axis=1)
        raw = tokens.tobytes()
        return raw[: len(raw) // self.page_bytes * self.page_bytes]

    def match(self, key: bytes, namespace: Namespace = SHARED) -> Match:
        """Find the longest cached prefix.  Changes nothing."""
        match = Match(key, namespace, self._version)
        root = self._roots.get(namespace)
        if root is not None:
            match_on_device(match, root, self.page_bytes)
            if self._host is not None:
                match_on_host(match, self.page_bytes)
        return match

    def hash_before(self, match: Match) -> bytes:
        """Return the chained hash of the last page that a match has found; its namespace's seed if there is none."""
        node = match.host_end or match.end
        if node is None:
            return namespace_seed(match.namespace)
        start, above = match.num_pages + match.num_host_pages, node.parent
        while above is not None:
            start -= len(above.key) // self.page_bytes
            above = above.parent
        return node.page_hashes[start - 1]

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
        if self._host is not None and match.host_end is not None:
            self._host.touch(match.host_end, self.now)
        node.hits += 1
        self._num_handles += 1
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
        node, at, found = self._descend(handle, key, pages[start:], transfer=False)
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
        self._num_handles -= 1
        self._lock_counts.release(node)
        self._settle_root(node)

    def restore(self, handle: Handle, key: bytes, pages: Pages) -> int:
        """Bring back pages of ``key`` beyond the handle from the host.  pages: free ones; at most so many come back.

        Returns how many of them it took, from the front; the handle keeps these too.  ``drain_transfers`` returns the
        copies that fill them."""
        start = handle.num_pages
        key = key[: (start + len(pages)) * self.page_bytes]
        node, at, _ = self._descend(handle, key, pages, transfer=True)
        self._move(handle, node, at // self.page_bytes)
        return handle.num_pages - start

    def adopt(self, handle: Handle, key: bytes, pages: Pages) -> None:
        """Take pages for ``key`` beyond the handle, of which the tree has none.  They will be filled from the store."""
        node, start, size = handle.node, handle.num_pages, self.page_bytes
        assert node is not None, "a handle was used after its unlock"
        assert key[start * size : (start + 1) * size] not in node.children, "the tree has these pages"
        tail = key[start * size : (start + len(pages)) * size]
        self._move(handle, self._extend(handle, node, tail, pages, stored=True), start + len(pages))

    def evict(self, count: int) -> Pages:
        """Take ``count`` pages out of the tree, the worst candidates' first, or all evictable ones if those are fewer.

        The last leaf only loses its tail.  ``drain_transfers`` returns the copies that the host keeps."""
        freed: list[bytes] = []
        missing = min(count, self._lock_counts.num_evictable)
        while missing > 0:
            node = self._lock_counts.worst()
            if node.num_pages > missing:
                self._split(node, node.num_pages - missing)
            missing -= node.num_pages
            freed.append(bytes(node.pages))
            self._leave_device(node)
        return np.frombuffer(b"".join(freed), dtype=np.int32)

    def forget(self) -> None:
        """Empty the tree: the content of all pages is lost, in both tiers, and every handle is void.

        The caller frees the pages themselves: all of them."""
        if self._events is not None:
            for node in self._all_nodes():
                if node.pages:
                    self._events.removed(node, "device")
                if node.host_pages:
                    self._events.removed(node, "host")
        self._version += 1
        self._clear()

    # ---- output -----------------------------------------------------------------------------

    def drain_events(self) -> list[KVEvent]:
        """Return the events since the last call; none unless ``record_events``."""
        return self._events.drain() if self._events is not None else []

    def drain_transfers(self) -> list[Transfer]:
        """Return the copies between the tiers since the last call; they must happen in order, before the next step."""
        return self._host.drain_transfers() if self._host is not None else []

    def outline(self, max_nodes: int, holders: Pages | None = None) -> Outline:
        """Return a picture of the most used part, at a bounded cost.  holders: as in ``engine/kv/outline.py``."""
        return outline(reversed(self._roots.values()), self.now, max_nodes, holders, stride=2 if self._bigram else 1)

    # ---- internals --------------------------------------------------------------------------

    def _descend(
        self, handle: Handle, key: bytes, pages: Pages, *, transfer: bool
    ) -> tuple[Node, int, list[bytearray]]:
        """Walk from a handle's end along ``key`` as far as the tree has it, splitting the node where they differ.

        Host-only nodes get ``pages``, which continue the handle's.  Returns the end, its position in the
        key, and the pages that were on the device; with ``transfer`` it stops before those."""
        node = handle.node
        assert node is not None, "a handle was used after its unlock"
        page_bytes = self.page_bytes
        at = handle.num_pages * page_bytes
        assert key.startswith(node.key, at - len(node.key)), "the key does not continue what the handle keeps"
        found: list[bytearray] = []
        while at < len(key):
            child = node.children.get(key[at : at + page_bytes])
            if child is None or (transfer and child.pages):
                break
            if not key.startswith(child.key, at):
                child = self._split(child, common_bytes(child.key, key, at, page_bytes) // page_bytes)
            if child.pages:
                found.append(child.pages)
            else:
                first = at // page_bytes - handle.num_pages
                self._revive(child, pages[first : first + child.num_host_pages], transfer)
            at += len(child.key)
            node = child
        return node, at, found

    def _extend(self, handle: Handle, node: Node, tail: bytes, pages: Pages, *, stored: bool = False) -> Node:
        """Add ``tail`` below ``node``.  Return the node it ends in.  stored: the pages come from a store."""
        self._version += 1
        raw = bytearray(pages.tobytes())
        # A node that only this request ever used grows in place: a prompt in twenty chunks is one node, not twenty.
        own = node is handle.node and node.locks == 1 and not node.hits and not node.children and not node.host_pages
        if own and node.parent is not None and node.priority == handle.priority:
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
        if self.new_pages is not None and not stored:
            self.new_pages(node, first_page, pages)
        return node

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
        above = node.split(num_pages)
        if self._host is not None:
            self._host.note_split(above)
        return above

    def _revive(self, node: Node, pages: Pages, transfer: bool) -> None:
        """Give a host-only node device pages."""
        assert self._host is not None
        self._version += 1
        self._host.revive(node, pages, transfer)
        self._lock_counts.arrive(node)
        if self._events is not None:
            self._events.restored(node) if transfer else self._events.stored(node, "device")

    def _leave_device(self, node: Node) -> None:
        """Take a candidate's pages away; it stays in the tree if the host keeps a copy."""
        self._version += 1
        parent = node.parent
        assert parent is not None
        if self._events is not None:
            self._events.removed(node, "device")
        self._lock_counts.leave(node)
        kept = self._host is not None and self._host.keep(node)
        node.pages = bytearray()
        if self._host is not None and kept:
            self._host.join_only_child(node)
        else:
            self._detach(node)
        self._lock_counts.settle(parent)

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
        check_locks([*roots, *nodes], self._num_handles)
        check_pages(nodes, host=self._host is not None)
        self._lock_counts.check(nodes)
        if self._host is not None:
            self._host.check(nodes)
