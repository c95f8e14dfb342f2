"""Evicts the least urgent requests' pages.  For deployments that give their requests priorities."""

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}


class LeastUrgent:
    """Ranks prefixes by the priority of the most urgent request that used them; among equals, by the last use."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts the largest number first: a lower priority is more urgent, as in the queue."""
        return (-candidate.priority, candidate.last_used)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> LeastUrgent:
    """Build the strategy; takes no options."""
    decode_options("eviction.priority", context.options, Options)
    return LeastUrgent()
