"""The page allocator: which pages of the KV pool are free.

Owns: the free list, and the pages that were evicted last.  Does not know: tensors, requests, what a page holds.
Invariant (``check``): every page is free or held exactly once.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
NUM_EVICTIONS = 32  # remembered for the board


class PageAllocator:
    """A stack of free pages; the page freed last is handed out first, since it may still be in a CPU's caches.

    is_free: an entry per page; others only read it.  num_evicted: number of pages evicted so far.
    evicted: the latest evictions, each with ``num_evicted`` after it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self.evicted: deque[tuple[int, Pages]] = deque(maxlen=NUM_EVICTIONS)
        self.clear()

    def clear(self) -> None:
        """Make all pages free."""
        # Descending, so that a fresh pool hands out 0, 1, 2 ...: consecutive pages are contiguous memory.
        self._stack: Pages = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_pages
        self.is_free = np.ones(self.num_pages, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Number of pages that ``allocate`` can hand out."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Number of pages handed out and not yet freed."""
        return self.num_pages - self._num_free

    def allocate(self, count: int) -> Pages:
        """Take ``count`` pages; the caller has checked ``num_free``."""
        assert count <= self._num_free, f"{count} pages asked for, {self._num_free} free of {self.num_pages}"
        pages = self._stack[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.is_free[pages] = False
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back.  Each must be held, and listed once."""
        held = ~self.is_free[pages]
        assert held.all(), f"pages freed twice: {pages[~held][:8].tolist()}"
        self.is_free[pages] = True
        # Reversed, so that a run handed out as one comes back as the same run.
        self._stack[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)

    def evict(self, pages: Pages) -> None:
        """Take back pages that the cache has given up."""
        self.free(pages)
        self.num_evicted += len(pages)
        self.evicted.append((self.num_evicted, pages))

    def check(self) -> None:
        """Raise AssertionError unless the free list and the free flags agree."""
        listed = np.sort(self._stack[: self._num_free])
        flagged = np.flatnonzero(self.is_free)
        assert np.array_equal(listed, flagged), (
            f"free list ({len(listed)}) and flags ({len(flagged)}) disagree on {self.num_pages} pages"
        )
