"""Who holds which page: free ones, the radix tree's, and what each row holds for itself.

Owns: the allocator, the radix tree, each row's handle in it, pages that wait for a step in flight, and what the next
step is to copy between the tiers before it runs.
Does not know: queues, budgets, steps other than by number.
Invariant (``check``): free + cached + private + deferred = all pages, and every page has one owner.

A row's page table begins with pages of the tree, which its handle keeps, and goes on with private ones.  Computed
pages are published to the tree chunk by chunk.  Where the tree has them already, the row moves over to the tree's,
and its own duplicates go back once the last step that may read them has completed.
"""

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from engine.kv.events import KVEvent
from engine.kv.eviction import EvictionStrategy
from engine.kv.node import Handle, Namespace
from engine.kv.outline import Outline
from engine.kv.pages import PageAllocator, Pages
from engine.kv.radix import TOKEN_BYTES, RadixTree
from engine.messages import Landing, Step
from engine.scheduling.rows import PlannerLimits, Rows, RowTable, Sequence
from engine.scheduling.timelines import Evictions


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages from the store that the executors keep: ``num_pages`` of a prompt, from its page ``first_page`` on."""

    fetch_id: int
    first_page: int
    num_pages: int


class PageMoves:
    """Of one tree's pages."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._landings: list[Landing] = []

    def land(self, handle: Handle, key: bytes, fetched: Fetched, pages: Pages) -> None:
        """Use what was fetched, as far as it continues what the handle keeps.  pages: free ones, behind those."""
        first, end = handle.num_pages, fetched.first_page + fetched.num_pages
        if not fetched.first_page <= first < end:
            self.let_go(fetched.fetch_id)
            return
        pages = pages[: end - first]
        self._tree.adopt(handle, key, pages)
        self._landings.append(
            Landing(fetch_id=fetched.fetch_id, first=first - fetched.first_page, pages=pages.tobytes())
        )

    def let_go(self, fetch_id: int) -> None:
        """Nobody wants what was fetched, or is being fetched, any more."""
        self._landings.append(Landing(fetch_id=fetch_id))

    def forget(self) -> None:
        """The executors are gone, with all that they kept."""
        self._landings.clear()

    def added_to(self, step: Step) -> Step:
        """The step, with every move since the last one."""
        if transfers := self._tree.drain_transfers():
            directions = [np.full(len(one.host_pages), one.to_host, dtype=np.int32) for one in transfers]
            step = msgspec.structs.replace(
                step,
                transfer_to_host=np.concatenate(directions).tobytes(),
                transfer_device_pages=np.concatenate([one.device_pages for one in transfers]).tobytes(),
                transfer_host_pages=np.concatenate([one.host_pages for one in transfers]).tobytes(),
            )
        if saves := self._tree.drain_saves():
            step = msgspec.structs.replace(
                step,
                save_hashes=b"".join(hashes for hashes, _ in saves),
                save_pages=b"".join(pages.tobytes() for _, pages in saves),
            )
        if self._landings:
            step = msgspec.structs.replace(step, landings=tuple(self._landings))
            self._landings.clear()
        return step


@dataclass(frozen=True, slots=True)
class Appends:
    """Changes to page tables that the executors must hear of: row, index in its page table, page."""

    rows: Rows
    indexes: Rows
    pages: Pages


NO_ROWS: Rows = np.zeros(0, dtype=np.int32)
NO_APPENDS = Appends(NO_ROWS, NO_ROWS, NO_ROWS)


class PageManager:
    """Pages by owner, for the rows of one table.  allocator: who looks may read it.  moves: between the tiers."""

    def __init__(self, limits: PlannerLimits, rows: RowTable, strategy: EvictionStrategy) -> None:
        self.allocator = PageAllocator(limits.num_pages)
        self._evictions = Evictions(strategy, limits.page_size * TOKEN_BYTES * (1 + limits.bigram))
        self._tree = RadixTree(
            limits.page_size,
            self._evictions,
            bigram=limits.bigram,
            num_host_pages=limits.num_host_pages,
            record_events=limits.record_events,
            record_saves=limits.store_timeout_s > 0,
        )
        self._rows = rows
        self._page_size = limits.page_size
        self._num_behind = int(limits.bigram)  # tokens behind a page that its key has
        self._handles: dict[int, Handle] = {}
        self._deferred: deque[tuple[int, Pages]] = deque()
        self._rewrites: list[Appends] = []
        self.moves = PageMoves(self._tree)

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out, evicting what nobody uses."""
        return self.allocator.num_free + self._tree.num_evictable

    @property
    def num_free(self) -> int:
        """Pages without any content."""
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages whose content is kept although nobody uses it."""
        return self._tree.num_evictable

    @property
    def num_used(self) -> int:
        """Pages that requests need, or that wait for a step in flight."""
        return self.allocator.num_held - self._tree.num_evictable

    @property
    def num_on_host(self) -> int:
        """Pages of the host tier that hold something."""
        return self._tree.num_on_host

    def outline(self, max_nodes: int, holders: Pages) -> Outline:
        """The hottest part of the prefix cache.  holders: per page, gets the index of the node that has it."""
        return self._tree.outline(max_nodes, holders)

    def tick(self, step_id: int) -> None:
        """The clock of least-recent use: the step being planned."""
        self._tree.now = step_id

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of the sequence that would need no computing.  Changes nothing."""
        match = self._tree.match(self._prefix_key(sequence), Namespace(sequence.cache_salt, sequence.weights))
        return (match.num_pages + match.num_host_pages) * self._page_size

    def missing(self, sequence: Sequence) -> tuple[int, bytes, bytes]:
        """What a store may have of a sequence: from which page on, the hash before it, and the pages' tokens."""
        key = self._prefix_key(sequence)
        match = self._tree.match(key, Namespace(sequence.cache_salt, sequence.weights))
        first_page = match.num_pages + match.num_host_pages
        tokens = key[first_page * self._page_size * TOKEN_BYTES :]
        return first_page, self._tree.hash_before(match) if tokens else b"", tokens

    def start(self, sequence: Sequence, reserve: int, fetched: Fetched | None = None) -> int | None:
        """Give a sequence a row, with what is cached of it and new pages for the rest of its tokens.

        reserve: pages that must stay available beside it.  fetched: for this sequence, from the store.
        Returns the row, or None if there is no room now.
        """
        key = self._prefix_key(sequence)
        match = self._tree.match(key, Namespace(sequence.cache_salt, sequence.weights))
        num_new = -(-len(sequence.tokens) // self._page_size) - match.num_pages
        if num_new + reserve > self.num_available or not self._rows.has_slot(sequence):
            return None
        handle = self._tree.lock(match, sequence.priority)  # before counting again: what it keeps cannot be evicted
        if num_new + reserve > self.num_available:
            self._tree.unlock(handle)
            return None
        shared = self._tree.pages(handle)
        new = self.allocate(num_new, sequence.request_id)
        if match.num_host_pages:
            # What is on the host comes back into the first of the new pages, which are the tree's from then on.
            self._tree.restore(handle, key, new)
        if fetched is not None:
            self.moves.land(handle, key, fetched, new[handle.num_pages - len(shared) :])
        self._evictions.note_missed(sequence, handle, key)
        row = self._rows.take(sequence, np.concatenate((shared, new)), num_shared=handle.num_pages)
        self._handles[row] = handle
        return row

    def allocate(self, count: int, request_id: int) -> Pages:
        """Take pages for a request, evicting cached ones if too few are free; the caller looks at ``num_available``."""
        short = count - self.allocator.num_free
        if short > 0:
            self._evictions.request_id = request_id
            self.allocator.evict(self._tree.evict(short))
        return self.allocator.allocate(count)

    def publish(self, row: int, num_tokens: int) -> None:
        """The row's first ``num_tokens`` are computed by steps that have completed: share their whole pages."""
        handle = self._handles[row]
        table = self._rows
        num_pages = min(num_tokens, int(table.num_known[row]) - self._num_behind) // self._page_size
        if num_pages <= handle.num_pages:
            return
        key = self._tree.key(table.tokens[row, : num_pages * self._page_size + self._num_behind])
        published = self._tree.publish(handle, key, table.page_table[row, :num_pages].copy())
        count = len(published.pages)
        if count:
            indexes = np.arange(published.first, published.first + count, dtype=np.int32)
            table.page_table[row, indexes] = published.pages
            self._rewrites.append(Appends(np.full(count, row, dtype=np.int32), indexes, published.pages))
            self._deferred.append((int(table.last_step[row]), published.duplicates))

    def release(self, row: int) -> None:
        """The row is done and no step in flight uses it: its private pages are free, the tree's are for others."""
        pages = self._rows.release(row)
        handle = self._handles.pop(row)
        self._tree.unlock(handle)
        self.allocator.free(pages[handle.num_pages :])
        self._rewrites = [rewrite for rewrite in self._rewrites if rewrite.rows[0] != row]

    def forget(self) -> None:
        """What the pages held is lost: every row and every page is free, and nothing is cached."""
        self._tree.forget()
        self._rows.clear()
        self.allocator.clear()
        self._evictions.forget()
        self._handles.clear()
        self._deferred.clear()
        self._rewrites.clear()
        self.moves.forget()

    def collect(self, last_completed: int) -> None:
        """Free duplicates that no step in flight may read any more."""
        while self._deferred and self._deferred[0][0] <= last_completed:
            self.allocator.free(self._deferred.popleft()[1])

    def drain_events(self) -> list[KVEvent]:
        """What happened to cached pages since the last call."""
        return self._tree.drain_events()

    def take_rewrites(self) -> list[Appends]:
        """Page-table entries that changed since the last call."""
        rewrites, self._rewrites = self._rewrites, []
        return rewrites

    def _prefix_key(self, sequence: Sequence) -> bytes:
        if sequence.params.needs_whole_prompt:
            return self._tree.key(sequence.tokens[:0])
        # Without the last token: one must be computed, since its logits are wanted.
        return self._tree.key(sequence.tokens[: len(sequence.tokens) - 1 + self._num_behind])

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner."""
        self.allocator.check()
        self._tree.check()
        table = self._rows
        private = [NO_ROWS]
        for row, handle in self._handles.items():
            own = table.page_table[row, : table.num_pages[row]]
            shared = self._tree.pages(handle)
            assert np.array_equal(own[: handle.num_pages], shared), f"row {row} does not use the tree's pages"
            private.append(own[handle.num_pages :])
        private += [pages for _, pages in self._deferred]
        held = np.concatenate(private)
        assert len(np.unique(held)) == len(held), "a page is held twice"
        total = self.allocator.num_free + self._tree.num_cached + len(held)
        assert total == self.allocator.num_pages, (
            f"free {self.allocator.num_free} + cached {self._tree.num_cached} + held {len(held)} "
            f"!= {self.allocator.num_pages}"
        )
