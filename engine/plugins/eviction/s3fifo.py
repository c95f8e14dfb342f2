"""S3-FIFO: prefixes used once are evicted soon, those used again or cached again stay long (Yang et al. 2023).

The paper's two queues are modelled by how long a prefix may wait unused, counted in pages evicted meanwhile: a short
time for new prefixes, a long one for used ones, longer with more hits.  So a scan passes through a small part of the
pool.  A page that was evicted too soon is recognised by its hash when it returns: a ghost.
"""

from collections import OrderedDict
from typing import Annotated

from msgspec import Meta

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}

MOST_TURNS = 3  # hits that count, as in the paper


class S3FIFOOptions(Options, frozen=True):
    """Options of the plugin.

    small: share of the pool that new prefixes pass through.
    ghosts: evicted pages that are remembered, as a share of the pool; 80 to 200 bytes each."""

    small: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    ghosts: Annotated[float, Meta(gt=0, le=16)] = 1.0


class S3FIFO:
    """Ranks prefixes by the number of evicted pages at which their time ends."""

    def __init__(self, num_pages: int, small: float, ghosts: float) -> None:
        self._small_turn = int(num_pages * small)
        self._main_turn = num_pages - self._small_turn
        self._most_ghosts = max(1, int(num_pages * ghosts))
        self._num_evicted = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts new prefixes first."""
        turns = min(candidate.hits, MOST_TURNS)
        if not turns and candidate.page_hashes[0] in self._ghosts:
            turns = 1
        return (self._num_evicted + (self._main_turn * turns if turns else self._small_turn),)

    def evicted(self, candidate: Candidate) -> None:
        """Remember the pages of an evicted prefix."""
        self._num_evicted += candidate.num_pages
        for page_hash in candidate.page_hashes:
            self._ghosts[page_hash] = None
            self._ghosts.move_to_end(page_hash)
        while len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> S3FIFO:
    """Build the strategy with ``S3FIFOOptions``."""
    options = decode_options("eviction.s3fifo", context.options, S3FIFOOptions)
    return S3FIFO(context.num_pages, options.small, options.ghosts)
