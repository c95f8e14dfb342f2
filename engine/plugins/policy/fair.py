"""Shares the engine out between tenants: whoever has been served least, for their weight, goes first.

After Sheng et al. 2024, "Fairness in Serving Large Language Models": a counter of served tokens per tenant, raised to
that of who goes first when a tenant comes back, so that nobody saves up turns for later.  Priorities order the requests
of one tenant, and nobody else's."""

from typing import Annotated

from msgspec import Meta

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}
MOST_IDLE = 4096  # counters that are kept before those are dropped that say nothing

Weight = Annotated[float, Meta(gt=0)]


class FairOptions(Options, frozen=True):
    """weights: by the name of a tenant's key, 1 for those that are not named; twice the weight gets twice the tokens.

    output_cost: what an output token counts, where a prompt token that is not cached counts 1."""

    weights: dict[str, Weight] | None = None
    output_cost: Annotated[float, Meta(ge=0)] = 2.0


class FairShare:
    """By tokens served, divided by the tenant's weight."""

    looks_at_cache = False

    def __init__(self, options: FairOptions) -> None:
        self._weights = options.weights or {}
        self._output_cost = options.output_cost
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # who has no counter stands here
        self._sweep_at = MOST_IDLE

    def rank(self, waiting: Waiting) -> SortKey:
        """Most urgent first, within a tenant."""
        return (waiting.priority,)

    def turn(self, tenant: str) -> float:
        """What the tenant has been served."""
        return self._counters.get(tenant, self._floor)

    def returned(self, tenant: str, lowest: float) -> None:
        """Forget what the tenant left unused while it was away."""
        self._floor = lowest
        if self.turn(tenant) <= lowest:
            self._counters.pop(tenant, None)
        if len(self._counters) > self._sweep_at:
            self._counters = {name: count for name, count in self._counters.items() if count > lowest}
            # Twice as many until the next look, so that looking costs little for each tenant.
            self._sweep_at = max(MOST_IDLE, 2 * len(self._counters))

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Charge for tokens."""
        cost = num_prompt_tokens + self._output_cost * num_output_tokens
        self._counters[tenant] = self.turn(tenant) + cost / self._weights.get(tenant, 1.0)


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> FairShare:
    """Options: see ``FairOptions``."""
    return FairShare(decode_options("policy.fair", context.options, FairOptions))
