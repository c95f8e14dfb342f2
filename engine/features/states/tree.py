"""A radix tree whose prefixes are cached as far as they have a state.

Owns: the snapshots of states, each at the end of a node.  Does not know: how a state gets into a slot.
A state cannot be cut at a token as keys and values can.  So a match goes back to the deepest node with a snapshot, and
a row computes what follows again, even if there are pages of it.  A snapshot leaves with its node, or before that if
its slot is needed.  A node that gets one ends where the snapshot was taken: an edge is split there, and grows no more.

Where evicted pages have copies in host memory (another kind of tree, which this one may be as well), a snapshot that
leaves the device gets a slot there, in place of the worst one.
"""

from collections import Counter
from typing import Any

from engine.features.states.messages import ARRIVING
from engine.features.states.slots import SnapshotSlots
from engine.kv.eviction import EvictionStrategy
from engine.kv.match import Match
from engine.kv.node import INDEX_BYTES, SHARED, Handle, Namespace, Node
from engine.kv.pages import Pages
from engine.kv.radix import RadixTree


class StateTree(RadixTree):
    """A radix tree with snapshots of states.

    slots: those of snapshots, of which rows hold some."""

    keeps_states = True

    def __init__(
        self,
        page_size: int,
        strategy: EvictionStrategy,
        *,
        slots: SnapshotSlots,
        **others: Any,
    ) -> None:
        self._slots = slots
        self._snapshots: dict[Node, int] = {}
        self._lent: Counter[Node] = Counter()  # whose states are read by something that is no row
        super().__init__(page_size, strategy, **others)

    @property
    def num_snapshots(self) -> int:
        """Number of nodes with a snapshot."""
        return len(self._snapshots)

    @property
    def num_to_take(self) -> int:
        """Number of slots that ``take_slot`` would return: those that are free, and nodes' on the device, unless lent.

        Rows have none on the host, so slots held there are nodes' too."""
        num_lent = sum(not self._slots.is_on_host(self._snapshots[node]) for node in self._lent)
        return self._slots.num_free + len(self._snapshots) - self._slots.num_held_on_host - num_lent

    def match(self, key: bytes, namespace: Namespace = SHARED) -> Match:
        """Find the longest prefix that is cached with its state.  Changes nothing."""
        match = super().match(key, namespace)
        if match.end is not None:
            self._go_back(match)
        return match

    def match_here(self, key: bytes, namespace: Namespace) -> Match:
        """Find the longest prefix that is on the device and has a state.  Changes nothing."""
        match = super().match(key, namespace)
        match.host_end, match.num_host_pages = None, 0
        if match.end is not None:
            self._go_back(match)
        return match

    def num_pages_of(self, key: bytes, namespace: Namespace) -> int:
        """Return the number of cached pages of a key, with a state behind them or without."""
        return super().match(key, namespace).num_cached

    def _go_back(self, match: Match) -> None:
        """Cut a match after the deepest snapshot of its path."""
        node = match.host_end or match.end
        assert node is not None
        end = self._depth(node)
        while node.parent is not None and (end > match.num_cached or node not in self._snapshots):
            end -= len(node.key) // self.page_bytes
            node = node.parent
        if node.parent is not None and not node.pages:
            match.host_end, match.num_host_pages = node, end - match.num_pages
            return
        match.host_end, match.num_host_pages = None, 0
        match.raw_pages = match.raw_pages[: end * INDEX_BYTES]
        match.num_pages, match.end, match.num_end_pages = end, node, node.num_pages

    def _depth(self, node: Node) -> int:
        """Return the number of pages from the root to a node's end."""
        num_bytes = 0
        while node.parent is not None:
            num_bytes += len(node.key)
            node = node.parent
        return num_bytes // self.page_bytes

    def restore(self, handle: Handle, key: bytes, pages: Pages) -> int:
        """Bring back pages of ``key`` from the host as far as they have a state; the rest is computed again."""
        node, end, most = handle.node, handle.num_pages * self.page_bytes, 0
        assert node is not None, "a handle was used after its unlock"
        while (child := node.children.get(key[end : end + self.page_bytes])) is not None:
            if child.pages or not key.startswith(child.key, end):
                break
            node, end = child, end + len(child.key)
            if node in self._snapshots:
                most = end // self.page_bytes - handle.num_pages
        restored: int = super().restore(handle, key, pages[:most])  # type: ignore[misc]
        return restored

    # ---- snapshots --------------------------------------------------------------------------

    def slot_of(self, handle: Handle) -> int:
        assert handle.node is not None, "a handle was used after its unlock"
        return self._snapshots[handle.node]

    def take_slot(self) -> int | None:
        """Return a slot for a new snapshot, in place of the worst one if none is free; None if rows hold all."""
        slot = self._slots.take()
        if slot is None and (nodes := self._nodes(on_host=False)):
            self._leave_device(self._worst(nodes))
            slot = self._slots.take()
        return slot

    def _nodes(self, *, on_host: bool) -> list[Node]:
        """Return the nodes whose snapshots may leave."""
        return [
            node
            for node, slot in self._snapshots.items()
            if self._slots.is_on_host(slot) == on_host and node not in self._lent
        ]

    def _worst(self, nodes: list[Node]) -> Node:
        """Return the node whose snapshot goes next, by the rank of its pages.

        Snapshots that several requests have started from stay, unless they are more than half: at the end of a prompt
        or a turn one request goes on, and after a system prompt or a document many do."""
        is_shared = [node.hits > 1 for node in nodes]
        goes = 2 * sum(is_shared) > len(is_shared)
        return min(
            (node for node, shared in zip(nodes, is_shared, strict=True) if shared == goes),
            key=self._strategy.rank,
        )

    def _leave_device(self, node: Node) -> None:
        """Move a node's snapshot to host memory, in place of the worst one there; it is lost if there are no slots."""
        slot, on_host = self._snapshots[node], self._slots.take(on_host=True)
        if on_host is None and (there := self._nodes(on_host=True)):
            self._lose_snapshot(self._worst(there))
            on_host = self._slots.take(on_host=True)
        if on_host is not None:
            self._slots.copies.append((slot, on_host))
            self._snapshots[node] = on_host
            self._slots.free(slot)
        else:
            self._lose_snapshot(node)

    def keep(self, handle: Handle, num_pages: int, slot: int) -> None:
        """Give a slot to the end of the first ``num_pages`` pages of a handle; free it if there is a snapshot."""
        node, start = handle.node, handle.num_pages
        assert node is not None, "a handle was used after its unlock"
        assert 0 < num_pages <= start, f"a state after {num_pages} pages, of which the tree has {start}"
        while num_pages <= (start := start - node.num_pages):
            assert node.parent is not None
            node = node.parent
        if num_pages - start < node.num_pages:
            node = self._split(node, num_pages - start)
        if node in self._snapshots:
            self._slots.free(slot)
            return
        self._version += 1
        self._snapshots[node] = slot
        if self.new_state is not None:
            self.new_state(node, slot)

    def arrive(self, handle: Handle, number: int) -> None:
        """Keep a state that comes from elsewhere before the next step at a handle's end.  number: of what brings it."""
        slot = self.take_slot()
        assert slot is not None, "no slot for a state that arrives"
        self._slots.copies.append((ARRIVING - number, slot))
        self.keep(handle, handle.num_pages, slot)

    # ---- snapshots that another engine reads ------------------------------------------------

    @property
    def may_lend(self) -> bool:
        """Whether one more snapshot may be lent: half of the slots on the device stay for rows and other nodes."""
        return len(self._lent) < max(1, self._slots.num_on_device // 2)

    def lend_state(self, handle: Handle) -> None:
        """Keep the snapshot at a handle's end in its slot."""
        assert handle.node in self._snapshots, "a state is lent that the tree does not have"
        self._lent[handle.node] += 1

    def take_back(self, handle: Handle) -> None:
        assert handle.node is not None, "a handle was used after its unlock"
        self._lent[handle.node] -= 1
        if not self._lent[handle.node]:
            del self._lent[handle.node]

    def has_arrived(self, handle: Handle) -> bool:
        """Return whether the snapshot at a handle's end is in its slot: no copy to it is still to be made."""
        return not self._slots.is_awaited(self.slot_of(handle))

    def _lose_snapshot(self, node: Node) -> None:
        if (slot := self._snapshots.pop(node, None)) is not None:
            self._version += 1
            self._slots.free(slot)

    # ---- the tree ---------------------------------------------------------------------------

    def _clear(self) -> None:
        super()._clear()
        self._lent.clear()
        for node in [*self._snapshots]:
            self._lose_snapshot(node)

    def _may_grow(self, node: Node, handle: Handle) -> bool:
        return node not in self._snapshots and super()._may_grow(node, handle)

    def _may_join(self, node: Node) -> bool:
        return node not in self._snapshots

    def _drop(self, node: Node) -> None:
        slot = self._snapshots.get(node)
        if slot is not None and not self._slots.is_on_host(slot) and not self._may_stay():
            self._leave_device(node)
        super()._drop(node)

    def _may_stay(self) -> bool:
        """Return whether a snapshot stays on the device as its pages go to the host, where no slot is free for it."""
        return 0 < self._slots.num_host == self._slots.num_held_on_host

    def _detach(self, node: Node) -> None:
        self._lose_snapshot(node)
        super()._detach(node)

    def _check_contents(self, nodes: list[Node]) -> None:
        super()._check_contents(nodes)
        assert self._snapshots.keys() <= {*nodes}, "a node with a snapshot is not in the tree"
        assert self._lent.keys() <= self._snapshots.keys(), "a snapshot that is lent has gone"

    def slots_held(self) -> list[int]:
        """Return the slots of all snapshots."""
        return [*self._snapshots.values()]
