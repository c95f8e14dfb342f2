"""The owner of each page: the free list, the radix tree, or one row.

Owns: the allocator, the radix tree, each row's handle in it, and pages that wait for a step in flight.
Does not know: queues, budgets, steps other than by number.
Invariant (``check``): free + cached + private + deferred = all pages, and every page has one owner.

A row's page table begins with pages of the tree, which its handle keeps, and goes on with private ones.  Computed
pages are published to the tree chunk by chunk.  If the tree has them already, the row switches to the tree's pages,
and its own duplicates are freed when the last step that may read them has completed.
"""

from collections import deque

import numpy as np

from engine.kv.eviction import EvictionStrategy
from engine.kv.match import Match
from engine.kv.node import Handle, Namespace
from engine.kv.pages import PageAllocator, Pages
from engine.kv.radix import RadixTree
from engine.scheduling.events import WatchedEvictions
from engine.scheduling.feature import PlannerParts
from engine.scheduling.invariants import check_owners
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import Appends
from engine.scheduling.trees import Trees


class PageManager:
    """Pages by owner, for the rows of one table.  allocator, tree: only read by others.  num_kept: features' locks."""

    def __init__(self, parts: PlannerParts, strategy: EvictionStrategy) -> None:
        self._limits = limits = parts.limits
        self._table = parts.table
        self._features, self._events = parts.features, parts.events
        self.allocator = PageAllocator(limits.num_pages)
        self._evictions = WatchedEvictions(strategy, parts.events)
        self._trees = Trees(limits, self._evictions)
        self.tree = self._trees.new()
        self._page_size = limits.page_size
        self._num_behind = limits.lookahead  # tokens after a page that belong to its key
        self._handles: dict[int, Handle] = {}
        self.num_kept = 0
        self._deferred: deque[tuple[int, Pages]] = deque()
        self._rewrites: list[Appends] = []

    def use(self, kind: type[RadixTree], **arguments: object) -> None:
        """Use an empty tree of one more kind (``Trees.also``)."""
        self.tree = self._trees.also(kind, self.tree, **arguments)

    @property
    def num_available(self) -> int:
        """Number of pages that ``allocate`` can return, by evicting unused ones."""
        return self.allocator.num_free + self.tree.num_evictable

    def match(self, sequence: Sequence) -> Match:
        """Find the longest cached prefix of a sequence that it may use.  Changes nothing."""
        return self.tree.match(self._prefix_key(sequence), Namespace(sequence.cache_salt, sequence.weights))

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the number of the sequence's tokens that would need no computing.  Changes nothing."""
        return self.match(sequence).num_cached * self._page_size

    def start(self, sequence: Sequence, reserve: int) -> int | None:
        """Give a sequence a row, with the cached pages of its prefix and new pages for the rest of its tokens.

        reserve: number of pages that must stay available after that.
        Returns the row, or None if there is no room now.
        """
        match = self.match(sequence)
        num_new = -(-len(sequence.tokens) // self._page_size) - match.num_pages
        if num_new + reserve > self.num_available or not all(fits(sequence) for fits in self._features.has_room):
            return None
        handle = self.tree.lock(match, sequence.priority)  # before the second count: locked pages cannot be evicted
        if num_new + reserve > self.num_available:
            self.tree.unlock(handle)
            return None
        shared = self.tree.pages(handle)
        new = self.allocate(num_new, sequence.request_id)
        if self.match(sequence).num_cached < match.num_cached:  # evicted pages have taken the place of others
            self.allocator.free(new)
            self.tree.unlock(handle)
            return self.start(sequence, reserve)  # more pages are free now
        for adopt in self._features.adopt:
            adopt(sequence, handle, match.key, new[handle.num_pages - len(shared) :])
        for matched in self._events.matched:
            matched(sequence, handle, match.key, self.tree.page_bytes)
        row = self._table.take(sequence, np.concatenate((shared, new)), num_shared=handle.num_pages)
        self._handles[row] = handle
        for started in self._features.started:
            started(sequence)
        return row

    def allocate(self, count: int, request_id: int) -> Pages:
        """Take pages for a request, evicting cached ones if too few are free.  The caller checks ``num_available``."""
        short = count - self.allocator.num_free
        if short > 0:
            self._evictions.request_id = request_id
            self.allocator.evict(self.tree.evict(short))
        return self.allocator.allocate(count)

    def publish(self, row: int, num_tokens: int) -> None:
        """Share the whole pages of a row's first ``num_tokens`` tokens, which completed steps have computed."""
        handle, table = self._handles[row], self._table
        num_pages = min(num_tokens, int(table.num_known[row]) - self._num_behind) // self._page_size
        if num_pages <= handle.num_pages or handle.is_sealed:
            return
        key = self.tree.key(table.tokens[row, : num_pages * self._page_size + self._num_behind])
        published = self.tree.publish(handle, key, table.page_table[row, :num_pages].copy())
        if count := len(published.pages):
            indexes = np.arange(published.first, published.first + count, dtype=np.int32)
            table.page_table[row, indexes] = published.pages
            self._rewrites.append(Appends(np.full(count, row, dtype=np.int32), indexes, published.pages))
            self._deferred.append((int(table.last_step[row]), published.duplicates))

    def seal(self, row: int) -> None:
        """Share no more pages of a row than the tree has."""
        self._handles[row].is_sealed = True

    def release(self, row: int) -> None:
        """Free a row that no step in flight uses any more, and its private pages; the tree keeps the other pages."""
        for released in self._features.released:
            released(row)
        pages = self._table.release(row)
        self.tree.unlock(handle := self._handles.pop(row))
        self.allocator.free(pages[handle.num_pages :])
        self._rewrites = [rewrite for rewrite in self._rewrites if rewrite.rows[0] != row]

    def forget(self) -> None:
        """Make every row and every page free and empty the tree: the content of the pages is lost."""
        self.tree.forget()
        self._table.clear()
        self.allocator.clear()
        self._handles.clear()
        self._deferred.clear()
        self._rewrites.clear()

    def collect(self, last_completed: int) -> None:
        """Free duplicates that no step in flight can read any more."""
        while self._deferred and self._deferred[0][0] <= last_completed:
            self.allocator.free(self._deferred.popleft()[1])

    def take_rewrites(self) -> list[Appends]:
        """Return the page-table entries that changed since the last call."""
        rewrites, self._rewrites = self._rewrites, []
        return rewrites

    def _prefix_key(self, sequence: Sequence) -> bytes:
        if sequence.params.needs_whole_prompt:
            return self.tree.key(sequence.tokens[:0])
        # Without the last token: at least one token must be computed, since its logits are needed.
        return self.tree.key(sequence.tokens[: len(sequence.tokens) - 1 + self._num_behind])

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner."""
        check_owners(self.allocator, self.tree, self._table, self._handles, self._deferred, self.num_kept)
