"""The uniform numbers: uniform, independent over seeds and positions, a fixed function."""

import torch

from engine.sampling.draw import stream_starts, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published mixing function, in exact integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_numbers_equal_the_published_generator():
    for seed in (0, 1, 12345, (1 << 63) - 1):
        start = splitmix64(seed)
        begin = stream_starts(torch.tensor([seed]))
        assert int(begin) & MASK == start
        positions = [0, 1, 2, 1000, 1 << 30]
        found = uniforms(begin.expand(5), torch.tensor(positions))
        for position, number in zip(positions, found.tolist(), strict=True):
            bits = splitmix64((start + position * 0x9E3779B97F4A7C15) & MASK) >> 12
            assert number == (bits + 0.5) / 2**52


def test_first_output_of_the_published_generator():
    # SplitMix64 seeded with 1234567 starts with this number in every published test vector.
    assert splitmix64((1234567 + 0x9E3779B97F4A7C15) & MASK) == 6457827717110365317


def test_numbers_are_uniform_over_positions_and_over_seeds():
    starts = stream_starts(torch.arange(4096))
    for numbers in (
        uniforms(starts[:1].expand(4096), torch.arange(4096)),
        uniforms(starts, torch.zeros(4096, dtype=torch.int64)),
        uniforms(starts, torch.arange(4096)),
    ):
        assert numbers.min() > 0
        assert numbers.max() < 1
        deviations = ((torch.histc(numbers, 64, 0, 1) - 64) ** 2 / 64).sum().item()
        assert abs(deviations - 63) < 4 * (2 * 63) ** 0.5


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    starts = stream_starts(torch.arange(200))
    numbers = uniforms(starts.repeat_interleave(200), torch.arange(200).repeat(200)).view(200, 200) - 0.5
    pairs = ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:]), (numbers[1:, :-1], numbers[:-1, 1:]))
    for one, other in pairs:
        correlation = (one * other).mean().item() * 12
        assert abs(correlation) < 4 / one.numel() ** 0.5
