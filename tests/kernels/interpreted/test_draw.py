"""The pieces that a draw is made of: the torch sampler's uniform numbers, bit for bit, and the search for a border."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.sampling.draw import stream_starts, uniforms
from engine.sampling.triton.noise import uniform
from engine.sampling.triton.picks import first_above


@triton.jit
def store_uniforms(seeds, positions, out, BLOCK_N: tl.constexpr):
    n_N = tl.arange(0, BLOCK_N)
    tl.store(out + n_N, uniform(tl.load(seeds + n_N), tl.load(positions + n_N)))


def test_uniform_numbers_are_the_same_bits():
    limits = np.iinfo(np.int64)
    drawn = np.random.default_rng(0).integers(limits.min, limits.max, 60, endpoint=True)
    seeds = torch.tensor([0, 1, limits.max, limits.min, *drawn.tolist()])
    positions = torch.tensor([*range(32), *np.random.default_rng(1).integers(0, 1 << 31, 32).tolist()])
    found = torch.empty(64, dtype=torch.float64)
    store_uniforms[(1,)](seeds, positions, found, BLOCK_N=64)
    assert torch.equal(found, uniforms(stream_starts(seeds), positions))
    assert len(set(found.tolist())) == 64


@triton.jit
def store_first_above(totals, weights, target, out, BLOCK_K: tl.constexpr):
    k_K = tl.arange(0, BLOCK_K)
    found = first_above(tl.load(totals + k_K), tl.load(weights + k_K), tl.load(target), k_K, BLOCK_K)
    tl.store(out, found)


UP = 1.0 + 2.0**-52  # what another order of summation may make of 1.0


@pytest.mark.parametrize(
    "weights,totals,target,expected",
    [
        ([0.0, 1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 3.0], 0.0, 1),
        ([0.0, 1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 3.0], 1.0, 3),
        ([0.0, 1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 3.0], 3.5, 3),
        ([1.0, 0.0, 0.0, 0.0], [1.0, UP, 1.0, UP], 1.0, 0),
        ([0.5, 0.0, 0.5, 0.0], [0.5, 0.5, 1.0, UP], UP, 2),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], 0.0, 0),
        ([torch.nan] * 4, [torch.nan] * 4, torch.nan, 0),
    ],
)
def test_the_index_found_has_a_weight(weights, totals, target, expected):
    columns = (torch.tensor(one, dtype=torch.float64) for one in (totals, weights, target))
    found = torch.full((1,), -1)
    store_first_above[(1,)](*columns, found, BLOCK_K=4)
    assert found.item() == expected
