"""What outputs are expected to get, and how many pages a batch will need at most."""

import numpy as np
import pytest

from engine.scheduling.requests import FIRST_GUESS, OutputForecast, peak_growth


def expected(forecast: OutputForecast, generated: int, most: int = 10_000) -> float:
    return float(forecast.remaining(np.array([generated], np.int32), np.array([most], np.int32))[0])


def test_before_anything_has_ended_the_first_guess_counts() -> None:
    assert expected(OutputForecast(), 0) == FIRST_GUESS
    assert expected(OutputForecast(), 0, most=20) == 20


def test_outputs_are_expected_to_do_as_those_that_got_as_far() -> None:
    forecast = OutputForecast()
    lengths = [10, 20, 30, 100]
    for length in lengths:
        forecast.note_end(length)
    for generated in (0, 15, 29):
        most = np.full(400, 10_000, np.int32)
        remaining = forecast.remaining(np.full(400, generated, np.int32), most) + generated
        longer = [length for length in lengths if length > generated]
        share = {length: float(np.mean(remaining == length)) for length in longer}
        assert share == pytest.approx({length: 1 / len(longer) for length in longer}, abs=0.01)
    assert expected(forecast, 30) == 100 - 30, "an output of 30 tokens that goes on is longer than the one of 30"
    assert expected(forecast, 99) == 1


def test_an_output_longer_than_all_before_is_expected_to_get_twice_as_long() -> None:
    forecast = OutputForecast()
    forecast.note_end(10)
    assert expected(forecast, 50) == 50
    assert expected(forecast, 50, most=7) == 7


def test_only_recent_outputs_are_remembered() -> None:
    forecast = OutputForecast()
    for length in [1000] * 600 + [10] * 512:
        forecast.note_end(length)
    assert expected(forecast, 0) == 10


def test_a_retraction_makes_careful_and_ends_in_peace_make_bold_again() -> None:
    forecast = OutputForecast()
    forecast.note_end(100)
    forecast.note_retraction()
    assert expected(forecast, 0) == 125
    for _ in range(100):
        forecast.note_retraction()
    assert expected(forecast, 0) == 200, "there is a limit to caution"
    for _ in range(60):
        forecast.note_end(100)
    assert expected(forecast, 0) == pytest.approx(100, rel=0.01)


def brute_force_peak(remaining: list[int], slack: list[int], back: list[int], page_size: int) -> int:
    """Step by step: whoever has ended has given back its pages, the others have grown."""
    peak = 0
    for now in range(max(remaining) + 1):
        grown = sum(
            -(-max(now - room, 0) // page_size) for end, room in zip(remaining, slack, strict=True) if now <= end
        )
        given = sum(pages for end, pages in zip(remaining, back, strict=True) if end < now)
        peak = max(peak, grown - given)
    return peak


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_peak_is_that_of_stepping_through_the_future(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    for _ in range(200):
        count = int(rng.integers(1, 12))
        remaining = rng.integers(1, 200, count)
        slack, back = rng.integers(0, page_size, count), rng.integers(0, 20, count)
        peak = brute_force_peak(remaining.tolist(), slack.tolist(), back.tolist(), page_size)
        estimate = peak_growth(remaining.astype(np.float64), slack.astype(np.int32), back.astype(np.int32), page_size)
        assert abs(estimate - peak) <= count, "at most a page per sequence for rounding"


def test_nobody_grows_by_nothing() -> None:
    empty = np.zeros(0, np.int32)
    assert peak_growth(empty.astype(np.float64), empty, empty, 16) == 0


def test_who_ends_first_makes_room_for_the_others() -> None:
    together = peak_growth(np.array([100.0, 100.0]), np.zeros(2, np.int32), np.array([50, 50], np.int32), 1)
    staggered = peak_growth(np.array([10.0, 100.0]), np.zeros(2, np.int32), np.array([50, 50], np.int32), 1)
    assert staggered < together / 2
