"""Evicts what was hit least, but lets old fame fade: a prefix that no request uses any more goes in the end.

Every hit counts as if the pages had been used so many steps later, so rank and age are on one scale."""

from typing import Annotated

from msgspec import Meta

from callboard.plugins import Candidate, EvictionContext, Options, SortKey, decode_options, hookimpl

CALLBOARD_PLUGIN = {"api": 1}


class AgedLFUOptions(Options, frozen=True):
    """The options.  steps_per_hit: how much a hit is worth, in steps; 0 is LRU."""

    steps_per_hit: Annotated[int, Meta(ge=0)] = 1000


class AgedLFU:
    """A strategy that ranks by the step of the last use, plus a bonus for every hit."""

    def __init__(self, steps_per_hit: int) -> None:
        self._steps_per_hit = steps_per_hit

    def rank(self, candidate: Candidate) -> SortKey:
        """The smallest goes first."""
        return (candidate.last_used + self._steps_per_hit * candidate.hits,)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> AgedLFU:
    """Options: see ``AgedLFUOptions``."""
    return AgedLFU(decode_options("eviction.aged_lfu", context.options, AgedLFUOptions).steps_per_hit)
