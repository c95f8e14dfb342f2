"""Policies of snapshots: what the kit finds, the guard around those of others, the options of the built-in one."""

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from engine.plugins.manager import Plugins
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.plugins.snapshots.kind import SNAPSHOTS
from engine.plugins.snapshots.kit import check_snapshot_policy
from engine.plugins.snapshots.policy import GuardedSnapshots, PromptPages, snapshot_policy
from engine.types.errors import PluginError

FOUND = PromptPages(num_pages=20, num_of_prompt=18, num_cached=7, num_with_state=4)


class Sample:
    """A policy of snapshots that calls a function.  keeps_turns: as given."""

    keeps_branches = False

    def __init__(self, of_prompt: Callable[[PromptPages], Any], keeps_turns: Any = True) -> None:
        self.of_prompt = of_prompt
        self.keeps_turns = keeps_turns


class Changes(EndsAndBranches):
    """A policy of snapshots of which every object has other places."""

    made: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__(every=1 + len(self.made))
        self.made.append(1)


class Hoards(EndsAndBranches):
    """A policy of snapshots that keeps something of all prompts."""

    kept: ClassVar[list[bytearray]] = []

    def of_prompt(self, found: PromptPages) -> list[int]:
        self.kept.append(bytearray(100))
        return super().of_prompt(found)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Changes, "of another such policy"),
        (lambda: Sample(lambda found: [found.num_pages / 2]), "not a list of numbers of pages"),
        (lambda: Sample(lambda found: range(3)), "not a list of numbers of pages"),
        (lambda: Sample(lambda found: [], "often"), "expected a bool"),
        (lambda: object(), "lacks a part of SnapshotPolicy"),
        (Hoards, "it leaks"),
    ],
)
def test_a_broken_policy_is_named(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConformanceError, match=said):
        check_snapshot_policy(make)


@pytest.mark.parametrize("of_prompt", [lambda _: 1 / 0, lambda _: sys.exit(1), lambda _: (3,), lambda _: [2.0]])
def test_a_policy_of_others_that_fails_is_not_called_again(of_prompt: Callable[[PromptPages], Any]) -> None:
    calls: list[int] = []

    def counted(found: PromptPages) -> Any:
        calls.append(found.num_pages)
        return of_prompt(found) if len(calls) > 1 else [5]

    guarded = GuardedSnapshots("snapshots.odd", Sample(counted))
    assert (guarded.keeps_turns, guarded.keeps_branches) == (True, False)
    assert [guarded.of_prompt(FOUND) for _ in range(3)] == [[5], [], []]
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, {7, 18, 20}),
        ({"prompts": False}, {7}),
        ({"branches": False}, {18, 20}),
        ({"prompts": False, "branches": False, "every": 8}, {8, 16}),
    ],
)
def test_options_of_ends(options: dict[str, Any], places: set[int]) -> None:
    policy = snapshot_policy(Plugins({SNAPSHOTS: "ends"}, {"snapshots.ends": options}), 16)
    assert {*policy.of_prompt(FOUND)} == places
    assert policy.keeps_turns


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(PluginError, match=r"snapshots\.ends"):
        snapshot_policy(Plugins({SNAPSHOTS: "ends"}, {"snapshots.ends": {"every": -1}}), 16)
