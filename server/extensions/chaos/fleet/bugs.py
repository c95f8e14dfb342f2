"""Planted bugs of routers and replicas: each must be found by the simulation of fleets.

Owns: the bugs.  Does not know: how they are found.
"""

from collections.abc import Callable
from typing import Any

from server.extensions.chaos.sim.mutants import Method, Mutant, replacement
from server.extensions.replicas.replicas import Replicas
from server.proxy.affinity import PrefixAffinity
from server.proxy.passage import Passage
from server.proxy.replica import Replica, State


def a_lost_replica_is_still_chosen(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, replica, reason, url="": None


def what_a_lost_replica_held_is_remembered(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, name: None


@replacement
def a_stream_goes_on_a_token_too_early(pieces: Callable[..., tuple[bytes, ...]], self: Passage) -> tuple[bytes, ...]:
    for choice in self._choices.values():
        choice.tokens = choice.tokens[:-4]
    return pieces(self)


@replacement
def a_stream_begins_anew_elsewhere(pieces: Callable[..., tuple[bytes, ...]], self: Passage) -> tuple[bytes, ...]:
    self._choices.clear()
    return pieces(self)


@replacement
def the_count_of_a_streams_tokens_falls_behind(take: Callable[..., bytes], self: Passage, chunk: bytes) -> bytes:
    passed = take(self, chunk)
    for choice in self._choices.values():
        choice.num_events += 1
        if len(choice.tokens) > 12:
            del choice.tokens[-4:]
    return passed


@replacement
async def a_replica_that_comes_back_is_not_found(_: Method, self: Replicas, replica: Replica) -> None:
    pass


@replacement
async def a_drained_replica_is_not_started(_: Method, self: Replicas, replica: Replica) -> None:
    replica.state = State.STOPPED


def only_one_replica_gets_all(choose: Callable[..., Replica]) -> Callable[..., Replica]:
    return lambda self, blocks, besides: self.all[0]


MUTANTS: dict[Mutant, tuple[Any, str]] = {
    a_lost_replica_is_still_chosen: (Replicas, "lose"),
    what_a_lost_replica_held_is_remembered: (PrefixAffinity, "forget"),
    a_stream_goes_on_a_token_too_early: (Passage, "pieces"),
    a_stream_begins_anew_elsewhere: (Passage, "pieces"),
    the_count_of_a_streams_tokens_falls_behind: (Passage, "take"),
    a_replica_that_comes_back_is_not_found: (Replicas, "_find"),
    a_drained_replica_is_not_started: (Replicas, "undrain"),
    only_one_replica_gets_all: (Replicas, "choose"),
}
