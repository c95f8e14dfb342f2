"""Capture sizes: the schedules, and rounding up to them."""

import pytest

from engine.graphs.capturing import decode_sizes, piecewise_sizes, round_up


def test_token_counts_grow_in_wider_steps():
    sizes = piecewise_sizes(5120)
    assert sizes == (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        4608,
        5120,
    )


def test_batch_sizes_are_dense_where_batches_are_small():
    sizes = decode_sizes(600)
    assert sizes[:8] == (1, 2, 3, 4, 6, 8, 16, 24)
    assert {64, 80, 256, 288, 512, 576, 600} <= set(sizes)


@pytest.mark.parametrize("schedule", [decode_sizes, piecewise_sizes])
@pytest.mark.parametrize("largest", [1, 2, 3, 5, 7, 8, 31, 64, 100, 256, 1000, 4096, 5000])
def test_every_schedule_ends_at_its_largest_size(schedule, largest):
    sizes = schedule(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert all(round_up(sizes, count) is not None for count in range(1, largest + 1))


def test_counts_round_up_and_past_the_largest_there_is_none():
    sizes = (4, 8, 12)
    assert [round_up(sizes, count) for count in (1, 4, 5, 8, 9, 12, 13)] == [4, 4, 8, 8, 12, 12, None]


@pytest.mark.parametrize("count", [9, 33, 100, 257, 600, 3000])
def test_padding_stays_below_a_third_of_what_is_computed(count):
    for schedule in (decode_sizes, piecewise_sizes):
        size = round_up(schedule(4096), count)
        assert (size - count) / size < 1 / 3 or size <= 16
