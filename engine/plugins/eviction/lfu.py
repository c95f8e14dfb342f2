"""Evicts what the fewest requests hit.  Keeps popular prompts through a flood of one-off requests."""

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class LeastFrequentlyUsed:
    """By hits; among equals, by the step of the last use."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Fewest hits first."""
        return (candidate.hits, candidate.last_used)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> LeastFrequentlyUsed:
    """Takes no options."""
    decode_options("eviction.lfu", context.options, Options)
    return LeastFrequentlyUsed()
