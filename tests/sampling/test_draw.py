"""The inverse CDF against exact arithmetic, and at its ends."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.draw import BLOCK, draw, padded_scores, weights

ALMOST_1 = 1.0 - 2.0**-53
ALMOST_0 = 2.0**-53


@settings(deadline=None, max_examples=60)
@given(
    num_blocks=st.integers(1, 6),
    seed=st.integers(0, 1000),
    zeros=st.floats(0, 1),
    uniforms=st.lists(st.floats(ALMOST_0, ALMOST_1), min_size=1, max_size=20),
)
def test_draws_equal_the_inverse_cdf_in_vocabulary_order(num_blocks, seed, zeros, uniforms):
    rng = np.random.default_rng(seed)
    row = (rng.random(num_blocks * BLOCK) ** 8).astype(np.float32) * (rng.random(num_blocks * BLOCK) >= zeros)
    row[rng.integers(len(row))] = 0.5
    weights_nW = torch.from_numpy(row.astype(np.float32)).repeat(len(uniforms), 1)
    found = draw(weights_nW, torch.tensor(uniforms, dtype=torch.float64)).numpy()
    exact = np.cumsum(row.astype(np.longdouble)) / row.astype(np.longdouble).sum()
    for index, uniform in zip(found, uniforms, strict=True):
        assert row[index] > 0
        # A block's sum is a float32, so a boundary may lie off by its last digits.
        assert (exact[index - 1] if index else 0) <= uniform + 1e-6
        assert uniform - 1e-6 <= exact[index]


@pytest.mark.parametrize("where", [[0], [511], [512], [700, 1300], [1535], list(range(100, 1200))])
@pytest.mark.parametrize("uniform", [ALMOST_0, 0.3, 0.999999, ALMOST_1])
def test_the_ends_of_the_distribution_never_fall_on_weight_zero(where, uniform):
    generator = torch.Generator().manual_seed(1)
    weights_nW = torch.zeros(50, 3 * BLOCK)
    # Weights over nine orders of magnitude make float32 and float64 sums differ.
    weights_nW[:, where] = 10.0 ** -(torch.rand((50, len(where)), generator=generator) * 9)
    found = draw(weights_nW, torch.full((50,), uniform, dtype=torch.float64))
    assert (weights_nW.gather(1, found[:, None]) > 0).all()
    if uniform == ALMOST_0:
        assert (found == where[0]).all()


def test_a_row_of_nan_stays_in_range():
    weights_nW = torch.full((2, BLOCK), float("nan"))
    weights_nW[0] = 1.0
    found = draw(weights_nW, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert found[0] == BLOCK // 2
    assert 0 <= found[1] < BLOCK


def test_weights_are_exact_powers_and_zero_where_nothing_is():
    logits_nV = torch.tensor([[2.0, 1.0, -float("inf"), -500.0]])
    found = weights(padded_scores(logits_nV, torch.tensor([2.0]), torch.tensor([0.5])))
    assert found.shape == (1, BLOCK)
    torch.testing.assert_close(found[0, :2], torch.tensor([1.0, np.exp(-0.5)], dtype=torch.float32))
    assert (found[0, 2:] == 0).all()


def test_rounding_between_two_blocks_never_falls_on_weight_zero():
    """A target just past the first block, where the sum before the second rounds to something beyond the target."""
    weights_nW = torch.zeros(1, 2 * BLOCK)
    weights_nW[0, 5] = 0.3
    weights_nW[0, BLOCK + 7] = 3.3e9
    first, second = weights_nW[0, 5].double(), weights_nW[0, BLOCK + 7].double()
    before = (first + second) - second
    assert before > first, "this case needs a sum that rounds up"
    target = (first + before) / 2
    uniform = target / (first + second)
    assert first < uniform * (first + second) < before
    assert draw(weights_nW, uniform[None]).tolist() == [BLOCK + 7]
