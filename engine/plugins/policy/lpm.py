"""Longest prefix match: the request with most tokens in the prefix cache runs first, while they are still cached.

Priority counts before the cache, since clients that send one expect that: urgent requests come first, and the cache
orders equally urgent ones.  Suited to many prompts that share a few long prefixes and do not all fit the pool."""

from typing import Annotated

from msgspec import Meta

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}


class LPMOptions(Options, frozen=True):
    """Options of the plugin.

    max_overtaken: after this many later arrivals have started before it, a request goes first among equally urgent
    ones, so that a prompt without a cached prefix does not wait forever."""

    max_overtaken: Annotated[int, Meta(ge=1)] = 64


class LongestPrefixMatch:
    """Orders requests by priority, then those overtaken too often by arrival, then the others by cached tokens."""

    looks_at_cache = True

    def __init__(self, max_overtaken: int) -> None:
        self._max_overtaken = max_overtaken

    def rank(self, waiting: Waiting) -> SortKey:
        """Return a rank that puts most cached tokens first, within a priority."""
        if waiting.num_overtaken >= self._max_overtaken:
            return (waiting.priority, 0, 0)
        return (waiting.priority, 1, -waiting.num_cached_now)


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> LongestPrefixMatch:
    """Build the policy with ``LPMOptions``."""
    return LongestPrefixMatch(decode_options("policy.lpm", context.options, LPMOptions).max_overtaken)
