"""Longest prefix match: who has most in the prefix cache runs first, while it is still there.

Priority counts before the cache, since who sends one expects it to: urgent requests come first, and the cache decides
among equally urgent ones.  For many prompts that share a few long prefixes and do not all fit the pool at once."""

from typing import Annotated

from msgspec import Meta

from engine.plugins.hookspecs import PolicyContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.policy import SortKey, Waiting

CALLBOARD_PLUGIN = {"api": 1}


class LPMOptions(Options, frozen=True):
    """max_overtaken: so many later arrivals may start before a request; then it goes first among equally urgent ones.

    This is what keeps a prompt that nobody shares from waiting for ever."""

    max_overtaken: Annotated[int, Meta(ge=1)] = 64


class LongestPrefixMatch:
    """By priority, then those that were overtaken too often by arrival, then the others by cached tokens."""

    looks_at_cache = True

    def __init__(self, max_overtaken: int) -> None:
        self._max_overtaken = max_overtaken

    def rank(self, waiting: Waiting) -> SortKey:
        """Most cached tokens first, within a priority."""
        if waiting.num_overtaken >= self._max_overtaken:
            return (waiting.priority, 0, 0)
        return (waiting.priority, 1, -waiting.num_cached_now)


@hookimpl
def callboard_scheduling_policy(context: PolicyContext) -> LongestPrefixMatch:
    """Options: see ``LPMOptions``."""
    return LongestPrefixMatch(decode_options("policy.lpm", context.options, LPMOptions).max_overtaken)
