"""The conformance kit for eviction strategies: one call checks a strategy, and lists every case that fails.

    from engine.plugins.testing.eviction import check_eviction_strategy
    check_eviction_strategy(MostRecentlyUsed)

Owns: random candidates and a random life of the prefix tree.  Does not know: torch, the quality of an order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.kv.eviction import EvictionListener, EvictionStrategy
from engine.kv.node import Handle, chained
from engine.kv.pages import PageAllocator, Pages
from engine.kv.radix import RadixTree
from engine.plugins.proof.findings import Findings
from engine.plugins.testing.promises import watch_memory, with_clocks
from engine.plugins.testing.ranks import check_ranks

NUM_PAGES = 48
NUM_OPERATIONS = 300
MOST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class SampleCandidate:
    """A candidate with everything that a strategy may read, as ``engine.kv.eviction.Candidate``."""

    created: int
    last_used: int
    hits: int
    priority: int
    num_pages: int

    @property
    def page_hashes(self) -> list[bytes]:
        """The hashes of its pages, unique to each candidate."""
        return list(chained(repr(self).encode(), bytes(self.num_pages), 1))


def check_eviction_strategy(make: Callable[[], EvictionStrategy]) -> None:
    """Check the ranks of random candidates, a tree that evicts by them, and the memory kept of evicted ones.

    make: builds a new one each time, as the plugin's hook does, for a pool of 48 pages.
    Raises ConformanceError with all that fails."""
    findings = Findings("eviction strategy")
    findings.timed("ranks", lambda: check_ranks(make().rank, _candidates()))
    for page_size in (1, 4, 16):
        findings.timed(f"random tree, page {page_size}", partial(_check_life, page_size, make))
    findings.timed("memory", lambda: _check_memory(make()))
    findings.conclude()


def _check_life(page_size: int, make: Callable[[], EvictionStrategy]) -> None:
    first, second = (_SampleLife(page_size, with_clocks(make(), "rank", "evicted")).run() for _ in range(2))
    assert first == second, "the same requests evict different pages in a second run"


def _check_memory(strategy: EvictionStrategy) -> None:
    """Check with new candidates all the time, each of which is evicted."""

    def come_and_go(number: int) -> None:
        candidate = SampleCandidate(number, number, 0, 0, 1)
        strategy.rank(candidate)
        if isinstance(strategy, EvictionListener):
            strategy.evicted(candidate)

    watch_memory(come_and_go, "a candidate that comes and goes")


def _candidates() -> list[SampleCandidate]:
    rng = np.random.default_rng(0)
    seen = [
        SampleCandidate(0, 0, 0, 0, 1),
        SampleCandidate(1 << 40, 1 << 40, 1 << 40, 1 << 31, 1 << 10),
        SampleCandidate(0, 1 << 40, 0, -(1 << 31), 1),
    ]
    for _ in range(200):
        created, age, hits, priority, num_pages = rng.integers(0, 1000, 5).tolist()
        seen.append(SampleCandidate(created, created + age, hits % 7, priority % 5 - 2, 1 + num_pages % 9))
    return seen


@dataclass(slots=True, eq=False)
class _SampleRequest:
    """A running request.  row: its pages, of which the tree owns the first ``handle.num_pages``."""

    tokens: np.ndarray
    handle: Handle
    row: list[int]


class _SampleLife:
    """Requests that share prefixes, arrive, publish their pages in chunks, end, and reuse each other's pages."""

    def __init__(self, page_size: int, strategy: EvictionStrategy) -> None:
        self._page_size = page_size
        self._tree = RadixTree(page_size, strategy)
        self._allocator = PageAllocator(NUM_PAGES)
        self._rng = np.random.default_rng(page_size)
        self._stems = self._rng.integers(0, 3, (3, 6 * page_size)).astype(np.int32)
        self._requests: list[_SampleRequest] = []
        self._evicted: list[list[int]] = []

    def run(self) -> list[list[int]]:
        """Return the pages of every eviction, in order.  Raises AssertionError if tree and strategy disagree."""
        for _ in range(NUM_OPERATIONS):
            self._tree.now += int(self._rng.integers(2))
            draw = int(self._rng.integers(6))
            if draw < 2 and len(self._requests) < MOST_REQUESTS:
                self._admit()
            elif draw < 4 and self._requests:
                self._chunk(self._requests[self._rng.integers(len(self._requests))])
            elif draw == 4 and self._requests:
                self._tree.unlock(self._requests.pop(self._rng.integers(len(self._requests))).handle)
            else:
                self._evict(int(self._rng.integers(1, 6)))
            self._tree.check()
            self._allocator.check()
        while self._requests:
            self._tree.unlock(self._requests.pop().handle)
        self._evict(NUM_PAGES)
        assert self._allocator.num_free == NUM_PAGES, f"{self._allocator.num_held} pages can never be evicted"
        return self._evicted

    def _admit(self) -> None:
        stem = self._stems[self._rng.integers(3), : self._rng.integers(1, 5) * self._page_size]
        tail = self._rng.integers(0, 2, self._rng.integers(1, 3 * self._page_size + 2)).astype(np.int32)
        tokens = np.concatenate((stem, tail))
        handle = self._tree.lock(self._tree.match(self._tree.key(tokens[:-1])), int(self._rng.integers(-1, 2)))
        self._requests.append(_SampleRequest(tokens, handle, self._tree.pages(handle).tolist()))

    def _chunk(self, request: _SampleRequest) -> None:
        """Compute up to two more pages, and publish them."""
        left = len(request.tokens) // self._page_size - len(request.row)
        wanted = min(left, int(self._rng.integers(1, 3)))
        missing = wanted - self._allocator.num_free
        if wanted <= 0 or missing > self._tree.num_evictable:
            return
        if missing > 0:
            self._evict(missing)
        request.row += self._allocator.allocate(wanted).tolist()
        key = self._tree.key(request.tokens[: len(request.row) * self._page_size])
        published = self._tree.publish(request.handle, key, np.array(request.row, dtype=np.int32))
        request.row[published.first : published.first + len(published.pages)] = published.pages.tolist()
        self._allocator.free(published.duplicates)

    def _evict(self, count: int) -> None:
        expected = min(count, self._tree.num_evictable)
        pages: Pages = self._tree.evict(count)
        needed = {page for request in self._requests for page in request.row}
        stolen = needed.intersection(pages.tolist())
        assert not stolen, f"pages {sorted(stolen)} were evicted while a request uses them"
        assert len(pages) == expected, f"{len(pages)} pages were evicted, {expected} could have been"
        self._allocator.free(pages)
        self._evicted.append(pages.tolist())
