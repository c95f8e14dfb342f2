"""Stop strings: the same cut for every chunking, and no more held back than must be."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stops import StopMatcher
from engine.types.params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

letters = st.sampled_from("aab")
texts = st.text(letters, max_size=30)
stop_lists = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By brute force over every occurrence: smallest end, then smallest start."""
    occurrences = [
        (begin + len(stop), begin, stop) for stop in stops for begin in range(len(text)) if text.startswith(stop, begin)
    ]
    if not occurrences:
        return text, None
    end, begin, stop = min(occurrences)
    return text[: end if include else begin], stop


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@pytest.mark.reliability("U2", "text cut into tokens and groups anywhere, also within a character or a stop string")
@settings(deadline=None, max_examples=1000)
@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=12), include=st.booleans())
def test_any_chunking_cuts_where_brute_force_does(text, stops, cuts, include):
    matcher = StopMatcher(stops, include=include)
    shown = "".join(matcher.push(piece) for piece in pieces_of(text, cuts)) + matcher.finish()
    assert (shown, matcher.matched) == reference(text, stops, include)


@settings(deadline=None, max_examples=500)
@given(text=texts, stops=stop_lists)
def test_exactly_the_longest_possible_beginning_of_a_stop_is_held_back(text, stops):
    matcher = StopMatcher(stops, include=False)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        if matcher.matched is not None:
            break
        longest = max(
            n for n in range(end + 1) if any(len(stop) > n and stop.startswith(text[end - n : end]) for stop in stops)
        )
        assert shown == text[: end - longest]


def test_with_the_stop_included_nothing_is_held_back():
    matcher = StopMatcher(["abc"], include=True)
    assert [matcher.push(piece) for piece in ("xa", "b", "yab", "cd")] == ["xa", "b", "yab", "c"]
    assert matcher.matched == "abc"


def test_text_after_a_match_is_dropped_also_by_finish():
    matcher = StopMatcher(["\n\n"], include=False)
    assert matcher.push("one\n") == "one"
    assert matcher.push("\ntwo\n") == ""
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_a_beginning_that_comes_to_nothing_is_shown():
    matcher = StopMatcher(["###"], include=False)
    assert [matcher.push(piece) for piece in ("a##", "b", "#")] == ["a", "##b", ""]
    assert matcher.finish() == "#"
    assert matcher.matched is None


def test_the_stop_that_ends_first_wins_and_of_those_the_longest():
    for stops in (["world", "lo wor"], ["lo wor", "world"]):
        matcher = StopMatcher(stops, include=False)
        assert matcher.push("hello world") == "hel"
        assert matcher.matched == "lo wor"
    matcher = StopMatcher(["c", "abc", "bc"], include=False)
    assert matcher.push("xabc") == "x"
    assert matcher.matched == "abc"


@pytest.mark.parametrize("special", ["]", "^", "-", "\\", "[a", "(", "\n", "🙂", "\u0301"])
def test_characters_with_a_meaning_in_patterns_are_plain(special):
    matcher = StopMatcher([special, "z"], include=False)
    assert matcher.push("ab" + special + "c") == "ab"
    assert matcher.matched == special


def test_the_worst_stop_strings_cost_constant_time_per_character():
    """16 strings of 1,024 characters that the text almost matches: a naive search takes minutes here."""
    length = MAX_STOP_STRING_CHARS - 1
    stops = ["a" * (length - index) + "b" for index in range(MAX_STOP_STRINGS)]
    matcher = StopMatcher(stops, include=False)
    text = "a" * 20_000
    shown = "".join(matcher.push(character) for character in text)
    assert len(shown) == len(text) - length
    assert matcher.push("b") == "a" * 0
    assert matcher.matched == stops[0]
