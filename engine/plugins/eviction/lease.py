"""Evicts the prefix that has been unused for longest, where a session's lease counts as use up to its end.

Owns: how a lease is written into the priority of a prefix, which ``engine/features/sessions`` does.
A prefix without a lease is ranked as by lru.  A lease that has ended is worth no more than a use at that time, so
nothing has to be undone, and where every prefix has one, the one that ends first goes first.
"""

from typing import Annotated, Final

from msgspec import Meta

from engine.kv.eviction import Candidate, SortKey
from engine.plugins.hookspecs import EvictionContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}

_LEASED: Final = 1 << 40  # beyond every priority of a client


def leased(until: int) -> int:
    """Return the priority of a prefix that has a lease up to this step."""
    return -(_LEASED + until)


class LeaseOptions(Options, frozen=True):
    """Options of the plugin, which the leases of sessions keep to.

    max_lease_s: the longest lease.  leased_share: of the pool, for the leases of all clients that have some.
    fetches: whether prefixes that wait in host memory come back before their sessions are expected."""

    max_lease_s: Annotated[float, Meta(gt=0, le=86_400)] = 300.0
    leased_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    fetches: bool = False


class LeaseOrder:
    """Ranks prefixes by the last step in which they count as used."""

    def rank(self, candidate: Candidate) -> SortKey:
        """Return a rank that puts the earliest step first."""
        return (max(candidate.last_used, -candidate.priority - _LEASED),)


@hookimpl
def callboard_eviction_strategy(context: EvictionContext) -> LeaseOrder:
    """Build the strategy with ``LeaseOptions``."""
    decode_options("eviction.lease", context.options, LeaseOptions)
    return LeaseOrder()
