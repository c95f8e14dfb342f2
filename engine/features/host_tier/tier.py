"""The host tier's bookkeeping: which evicted pages have a copy in host memory, and which of those go first.

Owns: the host's free pages, the order in which they are reclaimed, the list of transfers.
Does not know: memory, devices; the executor performs the transfers, in order, before the step that they come with.
A node is on the device, on the host, or on both.  Nodes on the device form a tree with the roots; host-only nodes hang
below.  When room is needed, copies of nodes that are on the device too go first, then leaves in the order of the
eviction strategy, so that a session's lease keeps its place there too.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.kv.events import EventLog
from engine.kv.eviction import EvictionQueue, SortKey
from engine.kv.node import Node, page_indices
from engine.kv.pages import PageAllocator, Pages


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A copy of pages between the tiers.  Order matters: a page may be the source of one and the target of the next."""

    to_host: bool
    device_pages: Pages
    host_pages: Pages


class HostTier:
    """The host tier: ``num_pages`` pages of host memory.

    detach: takes a node without children out of the tree.  rank: of a leaf, as in ``EvictionStrategy``."""

    def __init__(
        self,
        num_pages: int,
        detach: Callable[[Node], None],
        events: EventLog | None,
        rank: Callable[[Node], SortKey],
    ) -> None:
        self._detach = detach
        self._events = events
        self._allocator = PageAllocator(num_pages)
        self._leaves = EvictionQueue(rank)
        self._copies: OrderedDict[Node, None] = OrderedDict()
        self._transfers: list[Transfer] = []

    @property
    def num_used(self) -> int:
        """Number of host pages in use."""
        return self._allocator.num_held

    def drain_transfers(self) -> list[Transfer]:
        """Return the transfers since the last call, in the order in which they must happen."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def keep(self, node: Node) -> bool:
        """Copy a node that is about to lose its device pages; return False if the whole tier is too small for it.

        If False, the host's pages below the node are dropped as well."""
        if node.host_pages:
            del self._copies[node]
        elif node.num_pages <= self._allocator.num_pages:
            self._make_room(node.num_pages)
            host_pages = self._allocator.allocate(node.num_pages)
            node.host_pages = bytearray(host_pages.tobytes())
            self._transfers.append(Transfer(True, page_indices(node.pages), host_pages))
            if self._events is not None:
                self._events.stored(node, "host")
        else:
            self._drop_below(node)
            return False
        if not node.children:
            self._leaves.add(node)
        return True

    def join_only_child(self, node: Node) -> None:
        """Merge a host-only node with its only child; otherwise pages evicted one by one would be a node each."""
        if len(node.children) != 1 or node.parent is None:
            return
        (child,) = node.children.values()
        in_queue = child.place is not None
        if in_queue:
            self._leaves.remove(child)
        child.key[:0] = node.key
        child.host_pages[:0] = node.host_pages
        child.hashes = node.hashes + child.hashes if node.hashes and child.hashes else None
        child.created = min(child.created, node.created)
        child.last_used = max(child.last_used, node.last_used)
        child.priority = min(child.priority, node.priority)
        child.first, child.parent = node.first, node.parent
        node.parent.children[node.first] = child
        if in_queue:
            self._leaves.add(child)

    def touch(self, node: Node, now: int) -> None:
        """Note that a request has used these host-only pages."""
        node.last_used = now
        if node.place is not None:
            self._leaves.remove(node)
            self._leaves.add(node)

    def revive(self, node: Node, device_pages: Pages, transfer: bool) -> None:
        """Give a host-only node device pages again.  transfer: fill them from the host's copy."""
        if node.place is not None:
            self._leaves.remove(node)
        self._copies[node] = None
        node.pages = bytearray(device_pages.tobytes())
        if transfer:
            self._transfers.append(Transfer(False, device_pages, page_indices(node.host_pages)))

    def note_split(self, above: Node) -> None:
        """Note that ``above`` was split off a node; if that node is on both tiers, so is ``above``."""
        if above.pages and above.host_pages:
            self._copies[above] = None

    def _make_room(self, num_pages: int) -> None:
        while (missing := num_pages - self._allocator.num_free) > 0:
            if self._copies:
                node, _ = self._copies.popitem(last=False)
                self._free(node)
                continue
            leaf = self._leaves.first()
            assert leaf is not None, f"{self.num_used} host pages are in use and no node has them"
            if leaf.num_host_pages > missing:
                leaf.split(leaf.num_host_pages - missing)
            self._leaves.remove(leaf)
            self._drop(leaf)

    def _drop(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self._free(leaf)
        self._detach(leaf)
        parent.inherit(leaf)
        if parent.host_pages and not parent.pages and not parent.children:
            self._leaves.add(parent)

    def _drop_below(self, node: Node) -> None:
        below = list(node.children.values())
        for child in below:
            below.extend(child.children.values())
        for child in reversed(below):
            if child.place is not None:
                self._leaves.remove(child)
            self._drop(child)

    def _free(self, node: Node) -> None:
        if self._events is not None:
            self._events.removed(node, "host")
        self._allocator.free(page_indices(node.host_pages))
        node.host_pages = bytearray()

    def check(self, nodes: list[Node]) -> None:
        """Raise AssertionError unless the bookkeeping agrees with ``nodes``, which are all nodes of the tree."""
        self._allocator.check()
        self._leaves.check()
        held = np.concatenate([page_indices(node.host_pages) for node in nodes] or [np.zeros(0, dtype=np.int32)])
        assert len(np.unique(held)) == len(held) == self.num_used, "a host page is lost or held twice"
        copies = {id(node) for node in nodes if node.pages and node.host_pages}
        assert {id(node) for node in self._copies} == copies, "the list of copies is wrong"
        leaves = {id(node) for node in nodes if not node.pages and not node.children and node.parent is not None}
        assert {id(node) for node in self._leaves.nodes()} == leaves, "the host's leaves are wrong"
