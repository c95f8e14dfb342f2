"""Contests: candidates take turns, and the hopeless ones lose theirs."""

import statistics

import pytest

from engine.host.contest import Contest

SECONDS = {"a": 1.0, "b": 1.5, "c": 9.0}


def test_candidates_take_turns_in_every_case() -> None:
    said: list[str] = []

    def seconds(candidate: str, rows: int) -> float:
        said.append(f"{candidate}{rows}")
        return SECONDS[candidate] * rows

    assert Contest(seconds, (1, 2), turns=2).run("abc") == {"a": [1.0, 2.0], "b": [1.5, 3.0], "c": [9.0, 18.0]}
    assert said == ["a1", "a2", "b1", "b2", "c1", "c2"] * 2


@pytest.mark.parametrize(("middle", "expected"), [(min, 1.0), (statistics.median, 3.0)])
def test_one_time_stands_for_all_turns(middle: object, expected: float) -> None:
    times = iter([5.0, 1.0, 3.0])
    contest = Contest(lambda candidate, case: next(times), ("step",), turns=3, middle=middle)  # type: ignore[arg-type]
    assert contest.run(["a", "a"][:1]) == {"a": [5.0]}, "one that is alone is measured once"
    times = iter([5.0, 7.0, 1.0, 7.0, 3.0, 7.0])
    assert contest.run("ab")["a"] == [expected]


def test_what_is_hopeless_is_measured_once_and_what_comes_after_it_never() -> None:
    said: list[str] = []

    def seconds(candidate: str, case: str) -> float:
        said.append(candidate)
        return SECONDS[candidate]

    assert set(Contest(seconds, ("step",), turns=2, hopeless=2.0).run("abcb")) == {"a", "b", "c"}
    assert said == ["a", "b", "c", "a", "b"]
    said.clear()
    assert Contest(seconds, ("step",), turns=3, hopeless=2.0).run("ca") == {"c": [9.0], "a": [1.0]}
    assert said == ["c", "a"], "there is nothing to compare the best one with"


def test_a_contest_ends_when_its_time_is_over() -> None:
    turns = iter([False, True])
    said: list[str] = []
    contest = Contest(lambda one, case: said.append(one) or 1.0, ("step",), turns=9, is_over=lambda: next(turns))
    contest.run("ab")
    assert said == ["a", "b"] * 2
