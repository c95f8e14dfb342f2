"""Bias, penalties, min_tokens and log probabilities: the published formulas, on the right tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from engine.sampling.state import Newcomer, SamplingState, build_batch
from engine.types.params import MAX_LOGPROBS, SamplingParams
from tests.sampling.rows import CPU, EOS, MAX_LEN, admit, chi_square_excess, draw_many, new_sampler, sample_alone

V = 30


def adjusted_logits(
    params: SamplingParams, prompt: list[int], output: list[int], logits_V: torch.Tensor
) -> torch.Tensor:
    """The logits after penalties, for a row that was admitted with its output so far."""
    state = SamplingState(1, V, MAX_LEN, CPU)
    state.admit((Newcomer(0, params, np.array(prompt + output, dtype=np.int32), len(prompt)),), (EOS,))
    part = build_batch(state, np.array([0]), np.array([False])).parts[0]
    assert part.adjustments is not None
    assert part.adjustments.penalties is not None
    logits_NV = logits_V[None].clone()
    part.adjustments.penalties.apply(logits_NV, state.counts)
    return logits_NV[0]


tokens = st.lists(st.integers(0, V - 1), max_size=12)


@settings(deadline=None, max_examples=60)
@given(prompt=tokens.filter(bool), output=tokens, repetition=st.sampled_from([0.5, 1.1, 2.0]), seed=st.integers(0, 99))
def test_repetition_penalty_agrees_with_transformers(prompt, output, repetition, seed):
    logits_V = torch.randn(V, generator=torch.Generator().manual_seed(seed))
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + output]), logits_V[None].clone())[0]
    found = adjusted_logits(SamplingParams(repetition_penalty=repetition), prompt, output, logits_V)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@settings(deadline=None, max_examples=60)
@given(
    prompt=tokens.filter(bool),
    output=tokens,
    presence=st.sampled_from([-1.5, 0.0, 0.7]),
    frequency=st.sampled_from([-0.5, 0.3]),
)
def test_presence_and_frequency_penalties_follow_the_openai_formula(prompt, output, presence, frequency):
    logits_V = torch.linspace(-3, 3, V)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = adjusted_logits(params, prompt, output, logits_V)
    counts = np.bincount(output, minlength=V) if output else np.zeros(V)
    # mu[j] - c[j] * frequency - (c[j] > 0) * presence, counting the output alone
    expected = logits_V.numpy() - counts * frequency - (counts > 0) * presence
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, frequency_penalty=0.4, presence_penalty=0.3),
        SamplingParams(seed=5, repetition_penalty=1.7),
        SamplingParams(seed=6, presence_penalty=2.0, frequency_penalty=0.5, repetition_penalty=1.2, top_k=8),
    ],
)
def test_penalties_count_tokens_as_they_are_sampled_and_survive_a_resume(params):
    generator = torch.Generator().manual_seed(3)
    logits_per_step = [torch.randn(V, generator=generator) for _ in range(40)]
    prompt = [3, 3, 7]
    whole = new_sampler(2, V)
    admit(whole, 1, params, prompt, 3)
    known = list(prompt)
    for step, logits_V in enumerate(logits_per_step):
        token = int(whole.sample(logits_V[None], np.array([1]), np.array([len(known)])).token_ids_N[0])
        # A sequence that takes another row here, with everything known so far, must go on the same way.
        resumed = new_sampler(2, V)
        admit(resumed, 0, params, known, 3)
        again = int(resumed.sample(logits_V[None], np.array([0]), np.array([len(known)])).token_ids_N[0])
        assert token == again, f"step {step}"
        known.append(token)
    assert len(set(known[3:])) > 5


def test_counts_of_a_long_context_do_not_overflow():
    for max_len in (1000, 40_000):
        state = SamplingState(1, V, max_len, CPU)
        token_ids = np.full(max_len, 4, dtype=np.int32)
        state.admit((Newcomer(0, SamplingParams(frequency_penalty=1.0), token_ids, 1),), (EOS,))
        counts = state.counts.read(torch.tensor([0]))[0]
        assert int(counts[4]) == 2 * (max_len - 1) + 1
        assert counts.sum() == counts[4]


def test_a_failed_token_is_not_counted_anywhere():
    state = SamplingState(3, V, MAX_LEN, CPU)
    for row in range(3):
        state.admit((Newcomer(row, SamplingParams(presence_penalty=1.0), np.array([1, 2], dtype=np.int32), 1),), (EOS,))
    lines = torch.from_numpy(state.counts.lines(np.arange(3)))
    before = state.counts.read(lines)
    state.counts.add(lines, torch.tensor([-1, -1, 5]))
    changed = (state.counts.read(lines) - before).nonzero().tolist()
    assert changed == [[2, 5]]


def test_counts_are_held_for_rows_with_penalties_alone():
    state = SamplingState(64, V, MAX_LEN, CPU)
    no_penalty = np.array([1, 2], dtype=np.int32)
    for row in range(64):
        state.admit((Newcomer(row, SamplingParams(), no_penalty, 2),), (EOS,))
    assert state.counts._counts_CV.shape[0] == 0
    for row in range(9):
        state.admit((Newcomer(row, SamplingParams(presence_penalty=1.0), no_penalty, 1),), (EOS,))
    assert state.counts._counts_CV.shape[0] == 16
    lines = state.counts.lines(np.arange(9))
    assert len(set(lines.tolist())) == 9
    for row in range(9):
        state.admit((Newcomer(row, SamplingParams(presence_penalty=1.0), no_penalty, 1),), (EOS,))
    assert state.counts._counts_CV.shape[0] == 16


def test_logit_bias_is_added_before_the_temperature():
    logits_V = torch.zeros(V)
    params = SamplingParams(seed=1, temperature=2.0, logit_bias={3: 4.0, 5: -100.0})
    expected = logits_V.clone()
    expected[3], expected[5] = 4.0, -100.0
    drawn = draw_many(params, logits_V, 6000)
    assert chi_square_excess(drawn, (expected / 2).softmax(dim=-1)) < 4
    assert sample_alone(SamplingParams(temperature=0.0, logit_bias={9: 0.5}), logits_V) == 9


def test_bias_of_100_forces_and_of_minus_100_forbids():
    logits_V = torch.zeros(V)
    assert (draw_many(SamplingParams(seed=1, logit_bias={3: 100.0}), logits_V, 500) == 3).all()
    assert (draw_many(SamplingParams(seed=1, logit_bias={3: -100.0}), logits_V, 500) != 3).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_off_eos_and_stop_tokens_until_enough_are_there(temperature):
    logits_V = torch.full((V,), -5.0)
    logits_V[EOS], logits_V[7], logits_V[9] = 20.0, 19.0, 5.0
    params = SamplingParams(temperature=temperature, seed=1, min_tokens=3, stop_token_ids=(7,))
    found = [sample_alone(params, logits_V, position, tokens=[1, 1]) for position in range(2, 8)]
    assert all(token not in (EOS, 7) for token in found[:3])
    assert found[0] == 9 or temperature
    assert all(token in (EOS, 7) for token in found[3:])


@pytest.mark.parametrize("allowed", [[EOS], [7], [7, 9]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_never_brings_back_what_is_forbidden(temperature: float, allowed: list[int]) -> None:
    logits_V = torch.full((V,), -torch.inf)
    logits_V[allowed] = 1.0
    params = SamplingParams(temperature=temperature, seed=1, min_tokens=30, stop_token_ids=(3, 7))
    assert {sample_alone(params, logits_V, position, tokens=[1]) for position in range(1, 20)} == {max(allowed)}


def test_min_tokens_leaves_eos_alone_when_eos_does_not_stop():
    logits_V = torch.zeros(V)
    logits_V[EOS] = 20.0
    params = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True, stop_token_ids=(7,))
    assert sample_alone(params, logits_V) == EOS


def test_min_tokens_ends_within_a_batch_that_does_not_change():
    logits_NV = torch.zeros(2, V)
    logits_NV[:, EOS] = 20.0
    sampler = new_sampler(2, V)
    admit(sampler, 0, SamplingParams(temperature=0.0, min_tokens=2))
    admit(sampler, 1, SamplingParams(temperature=0.0))
    found = [
        sampler.sample(logits_NV, np.array([0, 1]), np.array([position, position])).token_ids_N.tolist()
        for position in (1, 2, 3)
    ]
    assert [tokens[0] != EOS for tokens in found] == [True, True, False]
    assert [tokens[1] for tokens in found] == [EOS, EOS, EOS]


def test_logprobs_are_those_of_the_raw_logits():
    generator = torch.Generator().manual_seed(1)
    logits_NV = torch.randn(4, V, generator=generator)
    sampler = new_sampler(4, V)
    admit(sampler, 0, SamplingParams(seed=1, temperature=3.0, logprobs=3, logit_bias={2: 50.0}, top_k=2))
    admit(sampler, 1, SamplingParams(temperature=0.0))
    admit(sampler, 2, SamplingParams(temperature=0.0, logprobs=0))
    admit(sampler, 3, SamplingParams(temperature=0.0, logprobs=20))
    sampled = sampler.sample(logits_NV, np.arange(4), np.ones(4, dtype=np.int64))
    assert sampled.token_ids_N[0] == 2
    assert sampled.logprobs is not None
    found = sampled.logprobs.messages()
    assert sorted(found) == [0, 2, 3]
    expected = logits_NV.log_softmax(dim=-1)
    for at, num_top in ((0, 3), (2, 0), (3, MAX_LOGPROBS)):
        assert found[at].logprob == pytest.approx(float(expected[at, sampled.token_ids_N[at]]), abs=1e-6)
        ids = np.frombuffer(found[at].top_ids, dtype=np.int32)
        values = np.frombuffer(found[at].top_logprobs, dtype=np.float32)
        best = expected[at].topk(num_top)
        assert ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(values, best.values.numpy(), atol=1e-6)


def test_processed_logprobs_are_those_that_tokens_are_drawn_by():
    logits_NV = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    sampler = new_sampler(6, V)
    cut = {"seed": 1, "temperature": 2.0, "top_k": 5, "top_p": 0.8, "logit_bias": {2: 3.0}, "logprobs": 20}
    admit(sampler, 0, SamplingParams(**cut, processed_logprobs=True))
    admit(sampler, 1, SamplingParams(**cut))
    admit(sampler, 2, SamplingParams(temperature=0.0, logprobs=20, processed_logprobs=True, logit_bias={2: 3.0}))
    admit(sampler, 3, SamplingParams(temperature=0.5, logprobs=20, processed_logprobs=True, seed=2))
    admit(sampler, 4, SamplingParams(temperature=0.5, seed=2, processed_logprobs=True))
    admit(sampler, 5, SamplingParams(temperature=0.5, logprobs=20, seed=2))
    sampled = sampler.sample(logits_NV, np.arange(6), np.ones(6, dtype=np.int64))
    assert sampled.logprobs is not None
    found = sampled.logprobs.messages()
    biased_NV = logits_NV.clone()
    biased_NV[:, 2] += 3.0
    best = (biased_NV[0] / 2.0).topk(5)
    inside = best.values.softmax(dim=-1).cumsum(dim=-1)
    kept = int((inside < 0.8).sum()) + 1
    values = np.frombuffer(found[0].top_logprobs, dtype=np.float32)
    assert np.frombuffer(found[0].top_ids, dtype=np.int32)[:kept].tolist() == best.indices[:kept].tolist()
    np.testing.assert_allclose(values[:kept], best.values[:kept].log_softmax(dim=-1).numpy(), atol=1e-6)
    assert (values[kept:] == -np.inf).all()
    for row, expected_V in (
        (1, logits_NV[1].log_softmax(dim=-1)),
        (2, biased_NV[2].log_softmax(dim=-1)),
        (3, (logits_NV[3] * 2.0).log_softmax(dim=-1)),
        (5, logits_NV[5].log_softmax(dim=-1)),
    ):
        assert found[row].logprob == pytest.approx(float(expected_V[sampled.token_ids_N[row]]), abs=1e-6)
    assert 4 not in found
    # A row has the same bits alone.
    alone = sampler.sample(logits_NV[3:4], np.array([3]), np.array([1])).logprobs
    assert alone is not None
    assert alone.messages()[0] == found[3]


def test_logprobs_of_named_tokens_stand_where_the_most_likely_would():
    logits_NV = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    sampler = new_sampler(4, V)
    asked = {0: (7, 3, 7), 1: None, 2: (), 3: (0, 1, 2, V - 1)}
    for row, ids in asked.items():
        wanted = {} if ids is None else {"logprobs": 0 if ids else 2, "logprob_token_ids": ids}
        admit(sampler, row, SamplingParams(temperature=0.0, logit_bias={5: 50.0}, **wanted))
    for _ in range(2):  # the second batch is the first one's again
        sampled = sampler.sample(logits_NV, np.arange(4), np.ones(4, dtype=np.int64))
    assert sampled.logprobs is not None
    found = sampled.logprobs.messages()
    expected = logits_NV.log_softmax(dim=-1)
    assert sorted(found) == [0, 2, 3]
    for row, ids in ((0, [7, 3]), (2, expected[2].topk(2).indices.tolist()), (3, [0, 1, 2, V - 1])):
        assert found[row].logprob == pytest.approx(float(expected[row, 5]), abs=1e-6)
        assert np.frombuffer(found[row].top_ids, dtype=np.int32).tolist() == ids
        values = np.frombuffer(found[row].top_logprobs, dtype=np.float32)
        np.testing.assert_allclose(values, expected[row, ids].numpy(), atol=1e-6)
    admit(sampler, 0, SamplingParams(temperature=0.0, logprobs=0))
    sampled = sampler.sample(logits_NV[:1], np.arange(1), np.ones(1, dtype=np.int64))
    assert sampled.logprobs is not None
    assert sampled.logprobs.messages()[0].top_ids == b""


def test_logprobs_work_with_a_vocabulary_smaller_than_the_list():
    sampler = new_sampler(1, 3)
    admit(sampler, 0, SamplingParams(temperature=0.0, logprobs=20))
    sampled = sampler.sample(torch.tensor([[1.0, 2.0, 0.0]]), np.array([0]), np.array([1]))
    assert sampled.logprobs is not None
    assert len(np.frombuffer(sampled.logprobs.messages()[0].top_ids, dtype=np.int32)) == 3
