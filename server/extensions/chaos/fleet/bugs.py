"""Planted bugs of routers and replicas: each must be found by the simulation of fleets.

Owns: the bugs.  Does not know: how they are found.
"""

from collections.abc import Callable

from server.extensions.chaos.sim.mutants import Method, instead_of, made_from
from server.extensions.replicas.replicas import Replicas
from server.proxy.affinity import PrefixAffinity
from server.proxy.passage import Passage
from server.proxy.replica import Replica, State


@made_from(Replicas, "lose")
def a_lost_replica_is_still_chosen(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, replica, reason, url="": None


@made_from(PrefixAffinity, "forget")
def what_a_lost_replica_held_is_remembered(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, name: None


@instead_of(Passage, "pieces")
def a_stream_goes_on_a_token_too_early(pieces: Callable[..., tuple[bytes, ...]], self: Passage) -> tuple[bytes, ...]:
    for choice in self._choices.values():
        choice.tokens = choice.tokens[:-4]
    return pieces(self)


@instead_of(Passage, "pieces")
def a_stream_begins_anew_elsewhere(pieces: Callable[..., tuple[bytes, ...]], self: Passage) -> tuple[bytes, ...]:
    self._choices.clear()
    return pieces(self)


@instead_of(Passage, "take")
def the_count_of_a_streams_tokens_falls_behind(take: Callable[..., bytes], self: Passage, chunk: bytes) -> bytes:
    passed = take(self, chunk)
    for choice in self._choices.values():
        choice.num_events += 1
        if len(choice.tokens) > 12:
            del choice.tokens[-4:]
    return passed


@instead_of(Replicas, "_find")
async def a_replica_that_comes_back_is_not_found(_: Method, self: Replicas, replica: Replica) -> None:
    pass


@instead_of(Replicas, "undrain")
async def a_drained_replica_is_not_started(_: Method, self: Replicas, replica: Replica) -> None:
    replica.state = State.STOPPED


@made_from(Replicas, "choose")
def only_one_replica_gets_all(choose: Callable[..., Replica]) -> Callable[..., Replica]:
    return lambda self, blocks, besides: self.all[0]
