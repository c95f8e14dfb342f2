"""Evicts the prefix with the fewest hits.  Keeps popular prompts through a flood of one-off requests."""

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class LeastFrequentlyUsed:
    """Ranks prefixes by hits; among equals, by the step of the last use."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts the fewest hits first."""
        return (candidate.hits, candidate.last_used)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> LeastFrequentlyUsed:
    """Build the strategy; takes no options."""
    decode_options("eviction.lfu", context.options, Options)
    return LeastFrequentlyUsed()
