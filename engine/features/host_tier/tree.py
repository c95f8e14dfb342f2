"""A radix tree with a second tier: evicted pages stay in it while the host has a copy of them.

Owns: the pages that leave the device and come back.  Does not know: which host pages are free (``HostTier`` does).
Nodes on the device form a tree with the roots; host-only nodes hang below them.
"""

from typing import Any

from engine.features.host_tier.tier import HostTier, Transfer
from engine.kv.eviction import EvictionStrategy, SortKey
from engine.kv.match import Match, common_bytes
from engine.kv.node import SHARED, Handle, Namespace, Node
from engine.kv.pages import Pages
from engine.kv.radix import RadixTree


class TieredTree(RadixTree):
    """A radix tree whose evicted pages have copies on the host.  num_host_pages: size of the host tier."""

    def __init__(
        self,
        page_size: int,
        strategy: EvictionStrategy,
        *,
        num_host_pages: int,
        **others: Any,
    ) -> None:
        self._num_host_pages = num_host_pages
        super().__init__(page_size, strategy, **others)

    def _clear(self) -> None:
        super()._clear()
        self.host = HostTier(self._num_host_pages, self._detach, self._events, self._strategy.rank)

    def drain_transfers(self) -> list[Transfer]:
        """Return the copies between the tiers since the last call; they must happen in order, before the next step."""
        return self.host.drain_transfers()

    def match(self, key: bytes, namespace: Namespace = SHARED) -> Match:
        """Find the longest prefix that is cached in either tier.  Changes nothing."""
        match = super().match(key, namespace)
        if match.end is not None:
            self._match_on_host(match)
        return match

    def _match_on_host(self, match: Match) -> None:
        """Continue a match through nodes that are only on the host."""
        node = match.end
        assert node is not None
        page_bytes = self.page_bytes
        key, at, shared = match.key, match.num_pages * page_bytes, match.num_end_pages * page_bytes
        while shared == len(node.key) and (child := node.children.get(key[at : at + page_bytes])) is not None:
            match.host_end = node = child
            shared = common_bytes(child.key, key, at, page_bytes)
            at += shared
        match.num_host_pages = at // page_bytes - match.num_pages

    def lock(self, match: Match, priority: int = 0) -> Handle:
        """Keep the matched pages on the device until ``unlock``, and note the use of those on the host."""
        if match.version != self._version:
            match = self.match(match.key, match.namespace)
        if match.host_end is not None:
            self.host.touch(match.host_end, self.now)
        return super().lock(match, priority)

    def restore(self, handle: Handle, key: bytes, pages: Pages) -> int:
        """Bring back pages of ``key`` beyond the handle from the host.  pages: free ones; at most so many come back.

        Returns how many of them it took, from the front; the handle keeps these too.  ``drain_transfers`` returns the
        copies that fill them."""
        node, start = handle.node, handle.num_pages
        assert node is not None, "a handle was used after its unlock"
        missing = key[start * self.page_bytes : (start + len(pages)) * self.page_bytes]
        node, at = self._revive_along(node, missing, pages, transfer=True)
        self._move(handle, node, start + at // self.page_bytes)
        return handle.num_pages - start

    def next_out(self) -> tuple[SortKey, int] | None:
        """Return the rank of the candidate that is evicted next, and its pages; None if there is none."""
        if not self.num_evictable:
            return None
        node = self._lock_counts.worst()
        return self._strategy.rank(node), node.num_pages

    def forget(self) -> None:
        if self._events is not None:
            for node in self._all_nodes():
                if node.host_pages:
                    self._events.removed(node, "host")
        super().forget()

    # ---- internals --------------------------------------------------------------------------

    def _revive_along(self, node: Node, key: bytes, pages: Pages, *, transfer: bool) -> tuple[Node, int]:
        """Give host-only nodes below ``node`` the pages for ``key``.  Return the last one and its position in the key.

        transfer: fill the pages from the host's copy; else they are filled already."""
        at, page_bytes = 0, self.page_bytes
        while (child := node.children.get(key[at : at + page_bytes])) is not None and not child.pages:
            node = self._split_at(child, key, at)
            first = at // page_bytes
            self._revive(node, pages[first : first + node.num_host_pages], transfer)
            at += len(node.key)
        return node, at

    def _revive(self, node: Node, pages: Pages, transfer: bool) -> None:
        self._version += 1
        self.host.revive(node, pages, transfer)
        self._lock_counts.arrive(node)
        if self._events is not None:
            self._events.restored(node) if transfer else self._events.stored(node, "device")

    def _extend(self, handle: Handle, node: Node, tail: bytes, pages: Pages) -> Node:
        """Add ``tail`` below ``node``, after the part of it that the host has and that the request computed again."""
        node, at = self._revive_along(node, tail, pages, transfer=False)
        return node if at == len(tail) else super()._extend(handle, node, tail[at:], pages[at // self.page_bytes :])

    def _may_grow(self, node: Node, handle: Handle) -> bool:
        return not node.host_pages and super()._may_grow(node, handle)

    def _split(self, node: Node, num_pages: int) -> Node:
        above = super()._split(node, num_pages)
        self.host.note_split(above)
        return above

    def _drop(self, node: Node) -> None:
        """Remove a node from the device; it stays in the tree if the host keeps a copy."""
        kept = self.host.keep(node)
        node.pages = bytearray()
        if not kept:
            self._detach(node)
        elif self._may_join(node):
            self.host.join_only_child(node)

    def _may_join(self, node: Node) -> bool:
        """Return whether a node that is only on the host may become a part of its only child."""
        return True

    def _check_contents(self, nodes: list[Node]) -> None:
        self.host.check(nodes)
