"""Draws follow the exact distribution; cuts leave what transformers' logits processors leave."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.types.params import SamplingParams
from tests.sampling.rows import chi_square_excess, draw_many, probabilities, sample_alone


def normal_logits(vocab_size: int, seed: int, scale: float = 3.0, num_rows: int = 1) -> Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * scale


def processed(params: SamplingParams, logits_NV: Tensor) -> Tensor:
    """The reference: transformers' processors in the order that the sampler documents."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits_NV.float())
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.double().softmax(dim=-1)


@pytest.mark.parametrize("vocab_size", [1, 2, 300, 1500])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.3),
        SamplingParams(seed=3, temperature=2.5),
        SamplingParams(seed=4, top_k=4),
        SamplingParams(seed=5, top_p=0.7),
        SamplingParams(seed=6, min_p=0.1),
        SamplingParams(seed=7, temperature=1.5, top_k=50, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(params, vocab_size):
    logits_V = normal_logits(vocab_size, seed=vocab_size)[0]
    drawn = draw_many(params, logits_V, 3000)
    assert chi_square_excess(drawn, processed(params, logits_V[None])[0]) < 4


def test_draws_at_consecutive_positions_of_one_seed_follow_the_distribution():
    logits_V = normal_logits(40, seed=3)[0]
    params = SamplingParams(seed=99)
    drawn = np.array([sample_alone(params, logits_V, position) for position in range(2000)])
    assert chi_square_excess(drawn, processed(params, logits_V[None])[0]) < 4
    pairs = drawn[:-1] * 40 + drawn[1:]
    expected = processed(params, logits_V[None])[0]
    assert chi_square_excess(pairs, (expected[:, None] * expected[None, :]).flatten()) < 4


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.integers(2, 1200),
    scale=st.sampled_from([0.5, 2.0, 5.0, 20.0]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.3, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 10, 100, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_cuts_agree_with_transformers(seed, vocab_size, scale, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits_NV = normal_logits(vocab_size, seed, scale, num_rows=3)
    ours, theirs = probabilities(params, logits_NV), processed(params, logits_NV)
    # Theirs sums probabilities in float32, so a boundary may fall one token apart; then that token is tiny.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 3, 64])
def test_top_p_keeps_the_smallest_sufficient_set(top_p, top_k):
    logits_NV = normal_logits(700, seed=11, num_rows=20)
    kept = probabilities(SamplingParams(top_p=top_p, top_k=top_k), logits_NV)
    full = processed(SamplingParams(top_k=top_k), logits_NV)
    for row in range(20):
        mass = full[row][kept[row] > 0].sum()
        least = full[row][kept[row] > 0].min()
        assert mass >= top_p - 1e-6
        assert mass - least < top_p + 1e-6


@pytest.mark.parametrize("cuts", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}])
def test_a_cut_keeps_every_token_equal_to_the_last_kept_one(cuts):
    # Probabilities 0.4, then six tokens of 0.1: three, or half of the mass, end inside the tie.
    logits_V = torch.tensor([0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1]).log()
    kept = probabilities(SamplingParams(**cuts), logits_V[None])[0]
    torch.testing.assert_close(kept, logits_V.double().softmax(dim=-1))
    assert probabilities(SamplingParams(top_p=0.4), logits_V[None])[0].count_nonzero() == 1


def test_bfloat16_logits_are_drawn_as_their_float32_values():
    logits_V = normal_logits(900, seed=5)[0].bfloat16()
    params = SamplingParams(temperature=0.6, top_p=0.9)
    assert torch.equal(probabilities(params, logits_V[None]), probabilities(params, logits_V[None].float()))


def test_top_p_zero_takes_the_most_likely_token_at_any_temperature():
    params, logits_V = SamplingParams(top_p=0, temperature=2.0, seed=1), normal_logits(300, seed=8)[0]
    params.check(300)
    assert {sample_alone(params, logits_V, position) for position in range(20)} == {int(logits_V.argmax())}


def test_temperature_zero_takes_the_first_of_the_most_likely_tokens():
    assert sample_alone(SamplingParams(temperature=0.0), torch.tensor([1.0, 3.0, 2.0, 3.0])) == 1
    assert sample_alone(SamplingParams(temperature=1e-9), torch.tensor([1.0, 3.0, 2.0, 3.0])) == 1


@pytest.mark.parametrize("temperature", [2e-5, 0.01, 100.0])
def test_extreme_temperatures_stay_finite(temperature):
    logits_NV = normal_logits(600, seed=8, scale=30.0, num_rows=4)
    found = probabilities(SamplingParams(temperature=temperature), logits_NV)
    torch.testing.assert_close(found, (logits_NV.double() / temperature).softmax(dim=-1), rtol=1e-3, atol=1e-5)
