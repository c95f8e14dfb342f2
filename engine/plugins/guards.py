"""Guards around ranks from third-party plugins: after a failure, a plugin is logged once and not called again.

Owns: the ranks that replace the plugin's after that.  Does not know: queues, trees, the quality of an order.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.kv.eviction import Candidate, EvictionListener, EvictionStrategy
from engine.scheduling.policy import SchedulingPolicy, TenantPolicy, Waiting

log = logging.getLogger(__name__)

T = TypeVar("T")
SortKey = tuple[int, ...]

SLOW_S = 0.05  # as for observers; every request waits meanwhile


class GuardedRank(Generic[T]):
    """Calls a plugin's ``rank`` until it fails.  name: the plugin's.  rank: its method.

    After a failure every call returns the last rank, so that later entries are ordered by age after all earlier ones,
    and none waits forever.  All ranks have one length, as the queues must compare them."""

    def __init__(self, name: str, rank: Callable[[T], SortKey], clock: Callable[[], float] = time.perf_counter) -> None:
        self._name = name
        self._rank: Callable[[T], SortKey] | None = rank
        self._clock = clock
        self._last: SortKey | None = None
        self._slow = False

    def __call__(self, ranked: T) -> SortKey:
        if self._rank is None:
            return self._last or (0,)
        began = self._clock()
        try:
            made = self._rank(ranked)
            self._check(made)
        except BaseException:  # even sys.exit, which would end the server
            log.exception("plugin %s failed to rank and is not called again; later ones are ordered by age", self._name)
            self._rank = None
            return self._last or (0,)
        took_s = self._clock() - began
        if took_s > SLOW_S and not self._slow:
            self._slow = True
            log.warning("plugin %s took %.0f ms to rank, and every request waited", self._name, took_s * 1000)
        if self._last is None or made > self._last:
            self._last = made
        return made

    def _check(self, made: object) -> None:
        if not isinstance(made, tuple) or not all(type(part) is int for part in made):
            raise TypeError(f"its rank is {made!r:.100}, not a tuple of ints")
        if self._last is not None and len(made) != len(self._last):
            raise TypeError(f"its rank is {made!r:.100}, and another had {len(self._last)} parts")


class GuardedListener:
    """Calls a strategy's ``evicted`` until it fails.  name: the plugin's."""

    def __init__(self, name: str, evicted: Callable[[Candidate], None]) -> None:
        self._name = name
        self._evicted: Callable[[Candidate], None] | None = evicted

    def __call__(self, candidate: Candidate) -> None:
        if self._evicted is None:
            return
        try:
            self._evicted(candidate)
        except BaseException:  # even sys.exit, as above
            log.exception("plugin %s failed in evicted and is not called again", self._name)
            self._evicted = None


class GuardedStrategy:
    """Guards an eviction strategy of a third party."""

    def __init__(self, name: str, strategy: EvictionStrategy) -> None:
        self.rank: Callable[[Candidate], SortKey] = GuardedRank(name, strategy.rank)
        if isinstance(strategy, EvictionListener):
            self.evicted = GuardedListener(name, strategy.evicted)


class GuardedPolicy:
    """Guards a scheduling policy of a third party."""

    def __init__(self, name: str, policy: SchedulingPolicy) -> None:
        self.looks_at_cache = bool(policy.looks_at_cache)
        self.rank: Callable[[Waiting], SortKey] = GuardedRank(name, policy.rank)


class GuardedTenantPolicy(GuardedPolicy):
    """Guards a policy that shares between tenants.  After a failure every tenant gets the highest turn so far."""

    def __init__(self, name: str, policy: TenantPolicy) -> None:
        super().__init__(name, policy)
        self._name = name
        self._policy: TenantPolicy | None = policy
        self._highest = 0.0

    def turn(self, tenant: str) -> float:
        """Return the plugin's turn for a tenant, or the highest one so far after a failure."""
        if self._policy is not None:
            try:
                turn = float(self._policy.turn(tenant))
                if not math.isfinite(turn):
                    raise ValueError(f"its turn is {turn}")
                self._highest = max(self._highest, turn)
                return turn
            except BaseException:  # even sys.exit, as above
                self._give_up()
        return self._highest

    def returned(self, tenant: str, lowest: float) -> None:
        """Call the plugin."""
        self._call(lambda policy: policy.returned(tenant, lowest))

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Call the plugin."""
        self._call(lambda policy: policy.served(tenant, num_prompt_tokens, num_output_tokens))

    def _call(self, what: Callable[[TenantPolicy], None]) -> None:
        if self._policy is not None:
            try:
                what(self._policy)
            except BaseException:
                self._give_up()

    def _give_up(self) -> None:
        log.exception("plugin %s failed to share turns and is not called again; tenants are served by age", self._name)
        self._policy = None


def guarded(name: str, policy: SchedulingPolicy) -> SchedulingPolicy:
    """Return a policy of a third party with the guard for its type."""
    return GuardedTenantPolicy(name, policy) if isinstance(policy, TenantPolicy) else GuardedPolicy(name, policy)
