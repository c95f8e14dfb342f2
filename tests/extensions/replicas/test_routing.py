"""The ways to choose a replica: each keeps its own promise, and a name that is not there is an error."""

import random

import pytest

from engine.types.errors import ConfigError
from server.extensions.replicas.routing import (
    ROUTINGS,
    SLACK_REQUESTS,
    Offer,
    PowerOfTwoRouting,
    PredictedRouting,
    PrefixRouting,
    SessionRouting,
    routing_named,
)
from server.proxy.affinity import HeldBlocks, PrefixAffinity
from server.proxy.replica import Replica, State

BLOCKS = [number.to_bytes(16, "big") for number in range(1, 6)]


def fleet(*busy: int) -> dict[str, Replica]:
    replicas = [Replica(f"replica{number}", state=State.READY, num_open=count) for number, count in enumerate(busy)]
    return {one.name: one for one in replicas}


def holding(name: str, count: int) -> PrefixAffinity:
    affinity = PrefixAffinity()
    affinity.learn(name, HeldBlocks("epoch", 1, True, BLOCKS[:count], []))
    return affinity


@pytest.mark.parametrize("name", ROUTINGS)
def test_each_chooses_one_that_is_offered(name: str) -> None:
    for count in (1, 2, 5):
        ready = fleet(*[0] * count)
        for blocks in ([], BLOCKS):
            chosen = routing_named(name).choose(Offer(blocks, ready, PrefixAffinity()))
            assert ready[chosen.name] is chosen


def test_the_prefix_goes_before_the_load_up_to_a_limit() -> None:
    affinity = holding("replica1", 3)
    assert PrefixRouting().choose(Offer(BLOCKS, fleet(0, SLACK_REQUESTS, 0), affinity)).name == "replica1"
    assert PrefixRouting().choose(Offer(BLOCKS, fleet(0, SLACK_REQUESTS + 1, 0), affinity)).name == "replica0"


def test_two_routers_agree_on_a_session_and_a_lost_replica_moves_no_others_sessions() -> None:
    sessions = [[number.to_bytes(16, "big")] for number in range(1 << 20, (1 << 20) + 200)]
    whole, fewer = fleet(0, 0, 0, 0), fleet(0, 0, 0)
    chosen = [SessionRouting().choose(Offer(one, whole, PrefixAffinity())).name for one in sessions]
    assert chosen == [SessionRouting().choose(Offer(one, whole, PrefixAffinity())).name for one in sessions]
    assert {"replica0", "replica1", "replica2", "replica3"} == set(chosen)
    for before, session in zip(chosen, sessions, strict=True):
        if before != "replica3":
            assert SessionRouting().choose(Offer(session, fewer, PrefixAffinity())).name == before


def test_the_less_busy_of_two_is_chosen() -> None:
    routing = PowerOfTwoRouting(random.Random(1))
    chosen = {routing.choose(Offer([], fleet(0, 1, 2, 3), PrefixAffinity())).name for _ in range(100)}
    assert "replica3" not in chosen
    assert len(chosen) == 3


def test_a_prediction_weighs_what_is_held_against_what_waits() -> None:
    affinity, ready = holding("replica1", 4), fleet(0, 0)
    assert PredictedRouting().choose(Offer(BLOCKS, ready, affinity)).name == "replica1"
    ready["replica1"].open_blocks = 5
    assert PredictedRouting().choose(Offer(BLOCKS, ready, affinity)).name == "replica0"


def test_a_class_elsewhere_is_a_policy_too() -> None:
    name = f"{PrefixRouting.__module__}:{PrefixRouting.__name__}"
    assert isinstance(routing_named(name), PrefixRouting)


@pytest.mark.parametrize("name", ["nonsense", "no.such:Thing", "json:nothing", "json:JSONDecoder"])
def test_a_policy_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"replicas\.routing"):
        routing_named(name)


def test_the_holders_are_those_of_every_report() -> None:
    affinity = holding("replica1", 3)
    affinity.learn("replica0", HeldBlocks("epoch", 1, True, BLOCKS[:2], []))
    assert affinity.num_held(BLOCKS) == {"replica0": 2, "replica1": 3}
    affinity.learn("replica1", HeldBlocks("epoch", 2, False, [], BLOCKS[1:3]))
    assert affinity.num_held(BLOCKS) == {"replica0": 2, "replica1": 1}
    affinity.forget("replica0")
    assert affinity.num_held(BLOCKS) == {"replica1": 1}
    assert affinity.find(BLOCKS, ["replica0", "replica1"]) == ["replica1"]
