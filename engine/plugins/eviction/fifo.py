"""Evicts what was cached first, however often it was used since.  The cheapest to reason about."""

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class FirstInFirstOut:
    """By the step of creation."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Oldest first."""
        return (candidate.created,)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> FirstInFirstOut:
    """Takes no options."""
    decode_options("eviction.fifo", context.options, Options)
    return FirstInFirstOut()
