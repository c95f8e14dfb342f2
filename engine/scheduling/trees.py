"""The tree of a planner: one radix tree of all kinds that features want.

Owns: how the kinds become one.  Does not know: which kinds there are, pages.
"""

from functools import cache

from engine.kv.eviction import EvictionStrategy
from engine.kv.radix import RadixTree
from engine.kv.stateless import StatelessTree
from engine.scheduling.rows import PlannerLimits


@cache
def joined(kinds: tuple[type[RadixTree], ...]) -> type[RadixTree]:
    """Return a class of several kinds, which has them as ``joins``; the kind itself if there is one."""
    return kinds[0] if len(kinds) == 1 else type("Tree", kinds, {"joins": kinds})


class Trees:
    """The kinds of tree that features have named so far, the last one first, and what such a tree is built with."""

    def __init__(self, limits: PlannerLimits, strategy: EvictionStrategy) -> None:
        self._limits = limits
        self._strategy = strategy
        self._kinds: tuple[type[RadixTree], ...] = ()
        self._arguments: dict[str, object] = {}

    def new(self) -> RadixTree:
        """Return an empty tree of all kinds.  If none of them keeps the states that a model needs, nothing is found."""
        limits, kinds = self._limits, self._kinds
        if limits.state_bytes and not any(getattr(kind, "keeps_states", False) for kind in kinds):
            kinds = (*kinds, StatelessTree)
        return joined(kinds or (RadixTree,))(
            limits.page_size,
            self._strategy,
            lookahead=limits.lookahead,
            record_events=limits.record_events,
            **self._arguments,
        )

    def also(self, kind: type[RadixTree], before: RadixTree, **arguments: object) -> RadixTree:
        """Return an empty tree that is of one more kind.

        before: the one in whose place it comes.  arguments: what it is built with, beside what all are."""
        self._kinds = (kind, *self._kinds)
        self._arguments |= arguments
        tree = self.new()
        tree.new_pages, tree.new_state = before.new_pages, before.new_state
        return tree
