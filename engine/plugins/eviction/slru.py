"""Segmented LRU: prefixes that were hit again outlive the others; in a segment, the least recently used goes first."""

from typing import Annotated

from msgspec import Meta

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class SLRUOptions(Options, frozen=True):
    """Options of the plugin.  protected_hits: hits that move a prefix to the segment that is evicted last."""

    protected_hits: Annotated[int, Meta(ge=1)] = 2


class SegmentedLRU:
    """Ranks prefixes by segment; within one, by the step of the last use."""

    def __init__(self, protected_hits: int) -> None:
        self._protected_hits = protected_hits

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts the segment on probation first, and the oldest use first."""
        return (int(candidate.hits >= self._protected_hits), candidate.last_used)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> SegmentedLRU:
    """Build the strategy with ``SLRUOptions``."""
    return SegmentedLRU(decode_options("eviction.slru", context.options, SLRUOptions).protected_hits)
