"""Scheduling policies: which of the waiting requests runs first.

Owns: what a policy is and what it may look at.  Does not know: rows, pages, how many may start.
"""

from typing import Protocol, runtime_checkable

SortKey = tuple[int, ...]


class Waiting(Protocol):
    """A request that has no row, new or retracted, as a policy sees it.

    arrival: its place in the order of arrival.  priority: lower is more urgent.
    num_tokens: tokens of its prompt, and of its output so far if it was retracted.
    max_tokens: the most tokens that its output may get, by its own limit or by the room there is.
    num_cached_now: how many of ``num_tokens`` are in the prefix cache now.
    num_overtaken: number of later arrivals that have started before it.
    Both are kept up to date only for policies that set ``looks_at_cache``.
    tenant: the name of its key; without keys the ``user`` that it names, or its address; '' for the program itself."""

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
    """The order of the waiting queue.  A first request that does not fit is waited for, never passed over."""

    @property
    def looks_at_cache(self) -> bool:
        """Whether ranks change with the prefix cache.

        If not, a request is ranked when it joins the queue; if so, the 128 that would
        be first with nothing cached are ranked whenever one may start."""
        ...

    def rank(self, waiting: Waiting) -> SortKey:
        """Return the rank of a request: the smallest runs first, and the oldest among equals.

        All ranks have the same number of ints.  Among equally urgent requests none may wait forever,
        however many better placed ones follow.
        If it raises or returns anything else, that is logged with the plugin's name, and it is not called again."""
        ...


@runtime_checkable
class TenantPolicy(SchedulingPolicy, Protocol):
    """A policy that also decides which tenant goes next, by the tokens that each tenant has got.

    Its ``rank`` orders the requests of one tenant, and is called when they join.  If a method raises or returns
    nonsense, that is logged with the plugin's name, and tenants take turns by age from then on."""

    def turn(self, tenant: str) -> float:
        """Return the turn of a tenant: the lowest goes first, and among equals the one that has waited longest.

        It never falls while the tenant waits.  It must rise for a tenant that is served, or others wait forever."""
        ...

    def returned(self, tenant: str, lowest: float) -> None:
        """Called when a tenant without waiting requests has one again.

        lowest: the smallest turn among waiting tenants, or the turn of the last one served."""
        ...

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Called when a request of the tenant has started, with prompt tokens to compute, or has got output tokens.

        Tokens are reported before ``turn`` is called, not with every step."""
        ...
