"""A radix tree whose prefixes are cached as far as they have a state.

Owns: the snapshots of states, each at the end of a node.  Does not know: how a state gets into a slot.
A state cannot be cut at a token as keys and values can.  So a match goes back to the deepest node with a snapshot, and
a row computes what follows again, even if there are pages of it.  A snapshot leaves with its node, or before that if
its slot is needed.  A node that gets one ends where the snapshot was taken: an edge is split there, and grows no more.
"""

from engine.features.states.slots import SnapshotSlots
from engine.kv.eviction import EvictionStrategy
from engine.kv.match import Match
from engine.kv.node import INDEX_BYTES, SHARED, Handle, Namespace, Node
from engine.kv.radix import RadixTree


class StateTree(RadixTree):
    """A radix tree with snapshots of states.  slots: those of snapshots, of which rows hold some."""

    def __init__(
        self,
        page_size: int,
        strategy: EvictionStrategy,
        *,
        slots: SnapshotSlots,
        lookahead: int = 0,
        record_events: bool = False,
    ) -> None:
        self._slots = slots
        self._snapshots: dict[Node, int] = {}
        super().__init__(page_size, strategy, lookahead=lookahead, record_events=record_events)

    @property
    def num_snapshots(self) -> int:
        """Number of nodes with a snapshot."""
        return len(self._snapshots)

    def match(self, key: bytes, namespace: Namespace = SHARED) -> Match:
        """Find the longest prefix that is cached with its state.  Changes nothing."""
        match = super().match(key, namespace)
        if match.end is not None:
            self._go_back(match, match.end)
        return match

    def num_pages_of(self, key: bytes, namespace: Namespace) -> int:
        """Return the number of cached pages of a key, with a state behind them or without."""
        return super().match(key, namespace).num_pages

    def _go_back(self, match: Match, node: Node) -> None:
        """Cut a match that ends in a node after the deepest snapshot of its path."""
        num_pages = match.num_pages
        if match.num_end_pages < node.num_pages and node.parent is not None:
            num_pages -= match.num_end_pages
            node = node.parent
        while node not in self._snapshots and node.parent is not None:
            num_pages -= node.num_pages
            node = node.parent
        match.raw_pages = match.raw_pages[: num_pages * INDEX_BYTES]
        match.num_pages, match.end, match.num_end_pages = num_pages, node, node.num_pages

    # ---- snapshots --------------------------------------------------------------------------

    def slot_of(self, handle: Handle) -> int:
        """Return the slot of the snapshot at a handle's end."""
        assert handle.node is not None, "a handle was used after its unlock"
        return self._snapshots[handle.node]

    def take_slot(self) -> int | None:
        """Return a slot for a new snapshot, in place of the worst one if none is free; None if rows hold all."""
        slot = self._slots.take()
        if slot is None and self._snapshots:
            self._lose_snapshot(self._worst())
            slot = self._slots.take()
        return slot

    def _worst(self) -> Node:
        """Return the node whose snapshot goes next, by the rank of its pages.

        Snapshots that several requests have started from stay, unless they are more than half: at the end of a prompt
        or a turn one request goes on, and after a system prompt or a document many do."""
        is_shared = [node.hits > 1 for node in self._snapshots]
        goes = 2 * sum(is_shared) > len(is_shared)
        return min(
            (node for node, shared in zip(self._snapshots, is_shared, strict=True) if shared == goes),
            key=self._strategy.rank,
        )

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

    def _lose_snapshot(self, node: Node) -> None:
        if (slot := self._snapshots.pop(node, None)) is not None:
            self._version += 1
            self._slots.free(slot)

    # ---- the tree ---------------------------------------------------------------------------

    def _clear(self) -> None:
        super()._clear()
        for node in [*self._snapshots]:
            self._lose_snapshot(node)

    def _may_grow(self, node: Node, handle: Handle) -> bool:
        return node not in self._snapshots and super()._may_grow(node, handle)

    def _drop(self, node: Node) -> None:
        self._lose_snapshot(node)
        super()._drop(node)

    def _check_contents(self, nodes: list[Node]) -> None:
        super()._check_contents(nodes)
        assert self._snapshots.keys() <= {*nodes}, "a node with a snapshot is not in the tree"

    def slots_held(self) -> list[int]:
        """Return the slots of all snapshots."""
        return [*self._snapshots.values()]
