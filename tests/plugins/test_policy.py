"""Who runs first under each policy, and that nobody waits for ever."""

from dataclasses import dataclass

import pytest

from engine.plugins.hookspecs import PolicyContext
from engine.plugins.manager import BUILTIN, Plugins
from engine.scheduling.policy import SchedulingPolicy
from engine.types.errors import PluginError

POLICIES = [name.removeprefix("policy.") for name in BUILTIN if name.startswith("policy.")]


@dataclass
class Waits:
    """One that waits."""

    arrival: int
    priority: int = 0
    num_tokens: int = 100
    num_cached_now: int = 0
    num_overtaken: int = 0


def policy(name: str, **options: object) -> SchedulingPolicy:
    """A built-in, through the door that plugins come through."""
    context = PolicyContext(max_running=4, page_size=1, options=options)
    return Plugins({"policy": name}).hook.callboard_scheduling_policy(context=context)


def order(policy: SchedulingPolicy, waiting: list[Waits]) -> list[int]:
    """Arrivals in the order in which they would start."""
    return [one.arrival for one in sorted(waiting, key=lambda one: (*policy.rank(one), one.arrival))]


WAITING = [
    Waits(0, priority=0, num_cached_now=0),
    Waits(1, priority=2, num_cached_now=90),
    Waits(2, priority=-1, num_cached_now=10),
    Waits(3, priority=0, num_cached_now=50),
    Waits(4, priority=-1, num_cached_now=20),
    Waits(5, priority=0, num_cached_now=50),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fair", [2, 4, 0, 3, 5, 1]),
        ("fcfs", [0, 1, 2, 3, 4, 5]),
        ("priority", [2, 4, 0, 3, 5, 1]),
        ("lpm", [4, 2, 3, 5, 0, 1]),
        ("auto", [2, 4, 0, 3, 5, 1]),
    ],
)
def test_the_order(name: str, expected: list[int]) -> None:
    assert order(policy(name), WAITING) == expected
    assert order(policy(name), WAITING[::-1]) == expected


def test_lpm_lets_who_was_overtaken_too_often_go_first_among_equally_urgent_ones() -> None:
    unlucky, nearly = Waits(1, num_overtaken=3), Waits(0, num_overtaken=2)
    cached, urgent = Waits(2, num_cached_now=99), Waits(3, priority=-1)
    assert order(policy("lpm", max_overtaken=3), [nearly, unlucky, cached, urgent]) == [3, 1, 2, 0]
    assert order(policy("lpm"), [nearly, unlucky, cached, urgent]) == [3, 2, 0, 1]


def test_under_lpm_nobody_is_overtaken_more_often_than_the_limit_says() -> None:
    rule, limit = policy("lpm", max_overtaken=8), 8
    waiting = [Waits(0), Waits(1)]
    most = {}
    for arrival in range(2, 200):
        waiting.append(Waits(arrival, num_cached_now=50))
        (first, *_) = order(rule, waiting)
        for one in waiting:
            one.num_overtaken += one.arrival < first
            most[one.arrival] = one.num_overtaken
        waiting = [one for one in waiting if one.arrival != first]
    assert {0, 1}.isdisjoint(one.arrival for one in waiting)
    assert max(most.values()) == limit


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_are_always_equally_many_ints(name: str) -> None:
    rule = policy(name)
    kinds = [*WAITING, Waits(6, num_overtaken=1000)]
    assert len({len(rule.rank(one)) for one in kinds}) == 1
    assert all(type(part) is int for one in kinds for part in rule.rank(one))


def test_only_lpm_looks_at_the_cache() -> None:
    assert {name for name in POLICIES if policy(name).looks_at_cache} == {"lpm"}


@pytest.mark.parametrize("name", POLICIES)
def test_options_a_policy_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(PluginError, match=rf"'policy.{name}'.*`sped`"):
        policy(name, sped=1)


def test_an_impossible_option_is_refused() -> None:
    with pytest.raises(PluginError, match="max_overtaken"):
        policy("lpm", max_overtaken=0)


def test_an_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(PluginError, match="available: fair, fcfs, lpm, priority"):
        Plugins({"policy": "random"})
