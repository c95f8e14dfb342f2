"""Evicts the prefix that has been unused for longest.  The default: it needs no tuning and suits conversations."""

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class LeastRecentlyUsed:
    """Ranks prefixes by the step of the last use."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts the oldest use first."""
        return (candidate.last_used,)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> LeastRecentlyUsed:
    """Build the strategy; takes no options."""
    decode_options("eviction.lru", context.options, Options)
    return LeastRecentlyUsed()
