"""The ways to choose a replica for a request.

Owns: the choice.  Does not know: HTTP, whether a replica is there; only those that take requests are offered.

``replicas.routing`` names one of these, or a class of a module elsewhere, ``module:Class``: it is built without
arguments and has a ``choose`` as ``RoutingPolicy`` describes it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Protocol

from engine.types.errors import ConfigError
from server.proxy.affinity import PrefixAffinity
from server.proxy.replica import Replica

# The replica that has the prefix is chosen unless it has so many requests more than the least busy one, and so many
# times as many.
SLACK_REQUESTS: Final = 8
SLACK_FACTOR: Final = 1.5


@dataclass(frozen=True, slots=True)
class Offer:
    """A request and the replicas that could take it.

    blocks: of its prompt, the session first if it names one.  ready: at least one, by name."""

    blocks: Sequence[bytes]
    ready: Mapping[str, Replica]
    affinity: PrefixAffinity

    @property
    def holders(self) -> list[Replica]:
        """The replicas with the longest beginning of the prompt."""
        return [self.ready[name] for name in self.affinity.find(list(self.blocks), self.ready)]


class RoutingPolicy(Protocol):
    """A way to choose."""

    def choose(self, offer: Offer) -> Replica:
        """Return one of the replicas that are ready."""
        ...


def least_busy(replicas: Sequence[Replica]) -> Replica:
    """Return the replica with the fewest open requests; of several, the one that was sent the fewest."""
    return min(replicas, key=lambda one: (one.num_open, one.num_sent))


def unless_far_busier(chosen: Replica, least: Replica) -> Replica:
    """Return the chosen replica, or the least busy one if that has far fewer requests."""
    return least if chosen.num_open > max(least.num_open + SLACK_REQUESTS, least.num_open * SLACK_FACTOR) else chosen


class PrefixRouting:
    """The replica with the longest beginning of the prompt; of several, the session's, then the least busy one."""

    def choose(self, offer: Offer) -> Replica:
        least = least_busy(list(offer.ready.values()))
        holders = offer.holders
        return unless_far_busier(least_busy(holders), least) if holders else least


class LeastBusyRouting:
    """The replica with the fewest open requests."""

    def choose(self, offer: Offer) -> Replica:
        return least_busy(list(offer.ready.values()))


class PowerOfTwoRouting:
    """The less busy one of two replicas that are drawn: no two routers have to agree, and none herds.

    rng: its draws."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, offer: Offer) -> Replica:
        ready = list(offer.ready.values())
        return least_busy(self._rng.sample(ready, min(2, len(ready))))


class SessionRouting:
    """The replica of the request's session, else that of its first blocks, by rendezvous hashing.

    All routers choose alike without any memory; a replica that comes or goes moves only its own sessions."""

    def choose(self, offer: Offer) -> Replica:
        least = least_busy(list(offer.ready.values()))
        if not offer.blocks:
            return least
        key = int.from_bytes(offer.blocks[0][-8:], "little")
        chosen = max(offer.ready.values(), key=lambda one: _mixed(key ^ _mixed(hash_of(one.name))))
        return unless_far_busier(chosen, least)


class PredictedRouting:
    """The replica whose first token is expected first, by the blocks that it has to compute until then."""

    def choose(self, offer: Offer) -> Replica:
        num_held = offer.affinity.num_held(list(offer.blocks))
        total = len(offer.blocks)
        return min(
            offer.ready.values(),
            key=lambda one: (one.open_blocks + total - num_held.get(one.name, 0), one.num_open, one.num_sent),
        )


ROUTINGS: Final[Mapping[str, Callable[[], RoutingPolicy]]] = {
    "prefix": PrefixRouting,
    "least_busy": LeastBusyRouting,
    "power_of_two": PowerOfTwoRouting,
    "session": SessionRouting,
    "predicted": PredictedRouting,
}


def routing_named(name: str) -> RoutingPolicy:
    """Return a policy by its name or by ``module:Class``.  Raises ConfigError for one that is not there."""
    if name in ROUTINGS:
        return ROUTINGS[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"replicas.routing = {name!r}: there are {', '.join(ROUTINGS)}, or a class as module:Class")
    try:
        policy: RoutingPolicy = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"replicas.routing = {name!r}: {error}") from None
    if not callable(getattr(policy, "choose", None)):
        raise ConfigError(f"replicas.routing = {name!r}: it has no method choose(offer)")
    return policy


def hash_of(name: str) -> int:
    """Return a number of a name that every process gets."""
    return int.from_bytes(name.encode()[-8:].rjust(8, b"\0"), "little")


def _mixed(number: int) -> int:
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)
