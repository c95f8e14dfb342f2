"""The most urgent request first.  The default: without priorities it is first come, first served."""

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}


class MostUrgentFirst:
    """Orders requests by priority; among equals, by arrival."""

    looks_at_cache = False

    def rank(self, waiting: Waiting) -> SortKey:
        """Return the priority: a lower one is more urgent."""
        return (waiting.priority,)


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> MostUrgentFirst:
    """Build the policy; takes no options."""
    decode_options("policy.priority", context.options, Options)
    return MostUrgentFirst()
