"""First come, first served: pure order of arrival, whatever priority a request brings.

For deployments where clients must not overtake each other by asking to."""

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}


class FirstComeFirstServed:
    """By arrival."""

    looks_at_cache = False

    def rank(self, waiting: Waiting) -> SortKey:
        """All are equal, and among equals who came first goes first."""
        return ()


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> FirstComeFirstServed:
    """Takes no options."""
    decode_options("policy.fcfs", context.options, Options)
    return FirstComeFirstServed()
