"""First come, first served: the order of arrival, whatever the priorities of requests.

Suited to deployments where clients must not overtake each other by request."""

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}


class FirstComeFirstServed:
    """Orders requests by arrival."""

    looks_at_cache = False

    def rank(self, waiting: Waiting) -> SortKey:
        """Return equal ranks; the queue orders equals by arrival."""
        return ()


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> FirstComeFirstServed:
    """Build the policy; takes no options."""
    decode_options("policy.fcfs", context.options, Options)
    return FirstComeFirstServed()
