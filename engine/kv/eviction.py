"""Eviction: what a strategy is, and the queue that keeps the candidates in its order.

Owns: the order among candidates.  Does not know: which nodes are candidates (the tree tells), pages, time.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from engine.kv.node import Node

CHUNK = 256  # A full chunk has twice as many entries: 4 KB of pointers to move at most, well below a microsecond.

SortKey = tuple[int, ...]
Entry = tuple[object, ...]


class Candidate(Protocol):
    """What a strategy may look at: part of a cached prefix that nobody uses and nothing cached continues.

    created, last_used: steps.  hits: requests that found their prefix here, or further on.
    priority: of its most urgent user so far, lower is more urgent.  num_pages: what evicting all of it frees."""

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


@runtime_checkable
class EvictionStrategy(Protocol):
    """Decides which candidate goes first."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Smaller goes first; among equals, who became a candidate first.  Always the same number of ints.

        Asked whenever something becomes a candidate; nothing a strategy sees but num_pages changes while it is one.
        If it raises or returns anything else, that is logged with the plugin's name, and it is asked no more.
        """
        ...


class EvictionQueue:
    """The candidates in order: a sorted list, cut into chunks.

    Adding, removing and looking at the first cost O(log n) comparisons and the move of one chunk's pointers.  A binary
    heap would be as fast but cannot remove: entries of nodes that got locked again would pile up, and the eviction that
    has to wade through them would stall a step.
    """

    def __init__(self, rank: Callable[[Node], SortKey]) -> None:
        self._rank = rank
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []
        self._num_added = 0

    def first(self) -> Node | None:
        """The next to go, if there is any."""
        if not self._chunks:
            return None
        node = self._chunks[0][0][-1]
        assert isinstance(node, Node)
        return node

    def add(self, node: Node) -> None:
        """Put a node where its rank belongs."""
        self._num_added += 1
        # The running number decides among equal ranks, so that nodes are never compared.
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
        """Take a node out, wherever it stands."""
        entry = node.place
        assert entry is not None, "the node is no candidate"
        node.place = None
        index = bisect_left(self._lasts, entry)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, entry)]
        if not chunk:
            del self._chunks[index], self._lasts[index]
        elif len(chunk) < CHUNK // 4 and index + 1 < len(self._chunks) and len(self._chunks[index + 1]) < CHUNK:
            # Small neighbours join, or a few entries that never leave would each keep a chunk.
            self._chunks[index] = chunk + self._chunks.pop(index + 1)
            del self._lasts[index]
        else:
            self._lasts[index] = chunk[-1]

    def nodes(self) -> list[Node]:
        """All candidates, the next to go first."""
        return [node for chunk in self._chunks for entry in chunk if isinstance(node := entry[-1], Node)]

    def check(self) -> None:
        """Raise AssertionError unless entries are in order and every node knows its own."""
        entries = [entry for chunk in self._chunks for entry in chunk]
        assert entries == sorted(entries), "the queue is out of order"
        assert self._lasts == [chunk[-1] for chunk in self._chunks], "a chunk's last entry is not the one noted"
        for entry, node in zip(entries, self.nodes(), strict=True):
            assert node.place is entry, "a node does not know its place in the queue"
