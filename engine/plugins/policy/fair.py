"""Shares the engine between tenants: the tenant served least, relative to its weight, goes first.

After Sheng et al. 2024, "Fairness in Serving Large Language Models": there is a counter of served tokens per tenant.
When a tenant returns, its counter is raised to that of the tenant that goes first, so that idle tenants earn no credit.
Priorities order the requests of one tenant only."""

from typing import Annotated

from msgspec import Meta

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}
MOST_IDLE = 4096  # counters kept before those without effect are dropped

Weight = Annotated[float, Meta(gt=0)]


class FairOptions(Options, frozen=True):
    """Options of the plugin.

    weights: by the name of a tenant's key, 1 for others; twice the weight gets twice the tokens.
    output_cost: cost of an output token, relative to an uncached prompt token."""

    weights: dict[str, Weight] | None = None
    output_cost: Annotated[float, Meta(ge=0)] = 2.0


class FairShare:
    """Orders tenants by tokens served, divided by the tenant's weight."""

    looks_at_cache = False

    def __init__(self, options: FairOptions) -> None:
        self._weights = options.weights or {}
        self._output_cost = options.output_cost
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # the counter of tenants without one
        self._sweep_at = MOST_IDLE

    def rank(self, waiting: Waiting) -> SortKey:
        """Return a rank that puts the most urgent first, within a tenant."""
        return (waiting.priority,)

    def turn(self, tenant: str) -> float:
        """Return the tenant's counter."""
        return self._counters.get(tenant, self._floor)

    def returned(self, tenant: str, lowest: float) -> None:
        """Raise the counter of a tenant that was away to ``lowest``."""
        self._floor = lowest
        if self.turn(tenant) <= lowest:
            self._counters.pop(tenant, None)
        if len(self._counters) > self._sweep_at:
            self._counters = {name: count for name, count in self._counters.items() if count > lowest}
            # Twice as many before the next sweep, so that the cost per tenant stays small.
            self._sweep_at = max(MOST_IDLE, 2 * len(self._counters))

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Charge a tenant for tokens."""
        cost = num_prompt_tokens + self._output_cost * num_output_tokens
        self._counters[tenant] = self.turn(tenant) + cost / self._weights.get(tenant, 1.0)


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> FairShare:
    """Build the policy with ``FairOptions``."""
    return FairShare(decode_options("policy.fair", context.options, FairOptions))
