"""How many proposals are verified follows from what steps cost and from how often proposals were right."""

import pytest

from engine.features.speculation.payoff import Chance, HitRate, Payoff


def measured(*, slope_s: float, base_s: float = 0.01) -> Payoff:
    payoff = Payoff()
    for num_rows in (1, 8):
        for _ in range(50):
            payoff.note_decode(num_rows, base_s)
    for num_tokens in (2, 5, 9, 16) * 30:
        payoff.note_verification(num_tokens, 1, base_s + slope_s * num_tokens)
    return payoff


def test_likely_proposals_are_verified_where_tokens_are_cheap_and_none_where_they_are_not() -> None:
    likely, unlikely = Chance(0.95, 8), Chance(0.1, 8)
    assert measured(slope_s=0.0005).counts([likely], 1, 100) == [8]
    assert measured(slope_s=0.0005).counts([unlikely], 1, 100) == [0]
    assert measured(slope_s=0.02).counts([likely], 1, 100) == [0]


def test_the_likeliest_come_first_and_no_more_than_fit() -> None:
    payoff = measured(slope_s=0.0001)
    counts = payoff.counts([Chance(0.5, 8), Chance(0.99, 8), Chance(0.9, 2)], 3, 10)
    assert counts[1] == 8
    assert counts[2] == 2
    assert counts[0] == 0


def test_tokens_that_are_not_known_yet_make_a_guess_less_likely() -> None:
    payoff = measured(slope_s=0.001)
    assert sum(payoff.counts([Chance(0.6, 4, ahead=0)], 1, 100)) > sum(payoff.counts([Chance(0.6, 4, ahead=3)], 1, 100))


def test_nothing_is_verified_for_many_rows_that_it_would_slow_down() -> None:
    payoff = measured(slope_s=0.004)
    assert payoff.counts([Chance(0.6, 8)], 8, 100) == [0]


def test_one_stall_of_the_machine_changes_little() -> None:
    payoff = measured(slope_s=0.0005)
    payoff.note_decode(1, 60.0)
    payoff.note_verification(9, 1, 60.0)
    assert payoff.counts([Chance(0.95, 8)], 1, 100)[0] >= 6


def test_before_anything_is_known_only_what_has_been_right_is_tried() -> None:
    rate = HitRate()
    assert rate.share == pytest.approx(0.25)
    for _ in range(8):
        rate.note(is_hit=True)
    assert rate.share > 0.8
    assert Payoff().counts([Chance(rate.share, 8)], 1, 100)[0] > 0
    for _ in range(8):
        rate.note(is_hit=False)
    assert rate.share < 0.5


def test_a_cost_far_above_the_assumed_one_is_believed_after_a_few_steps() -> None:
    """The passes of a draft model cost more than a token of an n-gram, which is what is assumed."""
    payoff = Payoff(tries_again=True)
    for _ in range(5):
        payoff.note_decode(1, 0.005)
    assert payoff.counts([Chance(0.99, 4)], 1, 100) == [4]
    for _ in range(5):
        payoff.note_verification(5, 1, 0.036)
    assert payoff.counts([Chance(0.99, 4)], 1, 100) == [0]


@pytest.mark.parametrize("tries_again", [False, True])
@pytest.mark.parametrize("num_before", [0, 1, 5, 200])
def test_two_stalls_in_a_row_do_not_end_speculation(num_before: int, tries_again: bool) -> None:
    payoff = Payoff(tries_again=tries_again)
    for _ in range(5):
        payoff.note_decode(1, 0.01)
    for _ in range(num_before):
        payoff.note_verification(4, 1, 0.0115)
    for _ in range(2):
        payoff.note_verification(4, 1, 0.05)
    assert payoff.counts([Chance(0.8, 3)], 1, 100)[0] > 0
