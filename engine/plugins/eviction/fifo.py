"""Evicts the prefix that was cached first, however often it was used since.  The simplest order to predict."""

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class FirstInFirstOut:
    """Ranks prefixes by the step of creation."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts the oldest first."""
        return (candidate.created,)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> FirstInFirstOut:
    """Build the strategy; takes no options."""
    decode_options("eviction.fifo", context.options, Options)
    return FirstInFirstOut()
