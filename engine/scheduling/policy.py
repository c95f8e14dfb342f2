"""Scheduling policies: who of those that wait runs first.

Owns: what a policy is and what it may look at.  Does not know: rows, pages, how many may start.
"""

from typing import Protocol, runtime_checkable

SortKey = tuple[int, ...]


class Waiting(Protocol):
    """What a policy may look at: a request that has no row, new or retracted.

    arrival: its place in the order of arrival.  priority: lower is more urgent.  num_tokens: of its prompt, and of its
    output so far if it was retracted.  max_tokens: the most its output may get, by its own limit or what there is room
    for.  num_cached_now: how many of them are in the prefix cache now; kept up to
    date only for policies that set ``looks_at_cache``.  num_overtaken: later arrivals that have started before it,
    counted for those policies too.  tenant: the name of its key; where there are no keys the ``user`` that it names,
    or its address; '' for a program's own."""

    @property
    def arrival(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_cached_now(self) -> int: ...
    @property
    def num_overtaken(self) -> int: ...
    @property
    def tenant(self) -> str: ...


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Decides the order of the waiting queue; who stands first and does not fit is waited for, never passed over."""

    @property
    def looks_at_cache(self) -> bool:
        """Whether ranks change with the prefix cache.

        If not, a request is ranked when it joins the queue; if so, the oldest 128 are ranked whenever one may start."""
        ...

    def rank(self, waiting: Waiting) -> SortKey:
        """Smaller runs first; among equals, who arrived first.  Always the same number of ints.

        Among equally urgent requests nobody may wait for ever, however many better placed ones follow.
        If it raises or returns anything else, that is logged with the plugin's name, and it is asked no more."""
        ...


@runtime_checkable
class TenantPolicy(SchedulingPolicy, Protocol):
    """What a policy may be besides: one that decides whose turn it is, by what each tenant has got.

    Its ``rank`` orders the requests of one tenant, and is asked when they join.  Where a method raises or returns
    nonsense, that is logged with the plugin's name, and tenants take turns by age from then on."""

    def turn(self, tenant: str) -> float:
        """Lowest goes first; among equals, who has waited longest for a turn.  It never falls while the tenant waits.

        Nobody may wait for ever: the turn of who is served must rise."""
        ...

    def returned(self, tenant: str, lowest: float) -> None:
        """A tenant waits again of whom nothing did.  lowest: the turn of who goes first now, or went last."""
        ...

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request of the tenant has started, with so many tokens to compute, or has got so many.

        Told before ``turn`` is asked, and only as often as there is room for somebody."""
        ...
