"""The conformance kit for scheduling policies: one call checks a policy, and lists every case that fails.

    from engine.plugins.testing.policy import check_scheduling_policy
    check_scheduling_policy(lambda: ShortestFirst(group=64))

Owns: random queues and the least fortunate request.  Does not know: torch, the quality of an order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from engine.plugins.proof.findings import Findings
from engine.plugins.testing.promises import watch_memory, with_clocks
from engine.plugins.testing.ranks import check_ranks
from engine.scheduling.policy import SchedulingPolicy, TenantPolicy

NUM_NEWCOMERS = 2000


@dataclass(frozen=True, slots=True)
class Waits:
    """A request with everything that a policy may read, as ``engine.scheduling.policy.Waiting``."""

    arrival: int
    priority: int = 0
    num_tokens: int = 100
    num_cached_now: int = 0
    num_overtaken: int = 0
    max_tokens: int = 100
    tenant: str = ""


def check_scheduling_policy(make: Callable[[], SchedulingPolicy]) -> None:
    """Check the ranks of random requests, that none waits forever, and that none is kept forever.

    make: builds a new one each time, as the plugin's hook does.  Raises ConformanceError with all that fails."""

    def timed() -> SchedulingPolicy:
        return with_clocks(make(), "rank")

    findings = Findings("scheduling policy")
    waiting = _waiting()
    findings.timed("looks_at_cache", lambda: _check_flag(make()))
    findings.timed("ranks", lambda: check_ranks(make().rank, waiting))
    findings.timed("two policies rank alike, in any order", lambda: _check_order(timed(), timed(), waiting))
    findings.timed("ranks do not depend on the cache", lambda: _check_unmoved(timed(), waiting))
    findings.timed("no request waits forever", lambda: _check_patience(timed()))
    findings.timed("memory", lambda: _check_memory(make()))
    if isinstance(make(), TenantPolicy):
        findings.timed("no tenant waits forever", lambda: _check_turns(_sharing(make)))
        findings.timed("memory of tenants", lambda: _check_tenants(_sharing(make)))
    findings.conclude()


def _check_flag(policy: SchedulingPolicy) -> None:
    seen = policy.looks_at_cache
    assert isinstance(seen, bool), f"looks_at_cache is {seen!r}, not True or False"


def _check_order(first: SchedulingPolicy, second: SchedulingPolicy, waiting: list[Waits]) -> None:
    """Check that a request's rank does not depend on requests ranked before."""
    backwards = [second.rank(one) for one in reversed(waiting)]
    assert [first.rank(one) for one in waiting] == backwards[::-1], "their ranks differ"


def _check_memory(policy: SchedulingPolicy) -> None:
    watch_memory(lambda number: policy.rank(Waits(number)), "a request that is ranked")


def _waiting() -> list[Waits]:
    rng = np.random.default_rng(0)
    seen = [Waits(0), Waits(1 << 40, 1 << 31, 1 << 31, 1 << 31, 1 << 31), Waits(1, -(1 << 31), 1)]
    for arrival in range(2, 200):
        priority, num_tokens, cached, overtaken = rng.integers(0, 1000, 4).tolist()
        seen.append(Waits(arrival, priority % 5 - 2, 1 + num_tokens, cached % (1 + num_tokens), overtaken))
    return seen


def _check_unmoved(policy: SchedulingPolicy, waiting: list[Waits]) -> None:
    """Check that a policy that ranks a request once, when it joins, does not read what changes later."""
    if policy.looks_at_cache:
        return
    for one in waiting:
        for later in (replace(one, num_cached_now=one.num_tokens), replace(one, num_overtaken=1 << 20)):
            assert policy.rank(one) == policy.rank(later), (
                "it ranks by num_cached_now or num_overtaken, but looks_at_cache is False"
            )


def _check_patience(policy: SchedulingPolicy) -> None:
    """Queue a long uncached prompt among short cached ones, all equally urgent; one starts at a time."""
    waiting = [Waits(0, num_tokens=1 << 20)]
    for arrival in range(1, NUM_NEWCOMERS):
        waiting.append(Waits(arrival, num_tokens=2, num_cached_now=1))
        if arrival % 4:  # keeps the queue from becoming empty
            continue
        first = min(waiting, key=lambda one: (policy.rank(one), one.arrival))
        if first.arrival == 0:
            return
        later = [replace(one, num_overtaken=one.num_overtaken + (one.arrival < first.arrival)) for one in waiting]
        waiting = [one for one in later if one.arrival != first.arrival][:128]
    raise AssertionError(
        f"a prompt of a million tokens still waits after {NUM_NEWCOMERS // 4} later ones of equal priority have started"
    )


def _sharing(make: Callable[[], SchedulingPolicy]) -> TenantPolicy:
    policy = with_clocks(make(), "turn", "returned", "served")
    assert isinstance(policy, TenantPolicy)
    return policy


def _check_turns(policy: TenantPolicy) -> None:
    """Let a well-served tenant wait for two that always want more; the turn of a waiting tenant must not fall."""
    tenants = ("patient", "greedy", "grim")
    for tenant in tenants:
        policy.returned(tenant, 0.0)
    policy.served("patient", NUM_NEWCOMERS // 4, 0)
    for _ in range(NUM_NEWCOMERS):
        turns = {tenant: policy.turn(tenant) for tenant in tenants}
        first = min(tenants, key=turns.__getitem__)
        if first == "patient":
            return
        policy.served(first, 1, 1)
        for tenant in tenants:
            assert policy.turn(tenant) >= turns[tenant], f"the turn of {tenant!r} falls while it waits"
    raise AssertionError(f"a tenant still waits after {NUM_NEWCOMERS} later requests of two others have been served")


def _check_tenants(policy: TenantPolicy) -> None:
    def come_and_go(number: int) -> None:
        tenant = f"tenant {number}"
        policy.returned(tenant, number * 1e6)
        policy.turn(tenant)
        policy.served(tenant, 10, 10)

    watch_memory(come_and_go, "a tenant that comes once", calls=10_000)
