"""Tokens drawn in C where a CPU runs a model: those that torch draws."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from engine.kernels.cpu import CPUKernels, cpu_kernels
from engine.sampling.draw import BLOCK, draw, padded_scores, padded_width, stream_starts, uniforms, weights
from engine.sampling.sampler import Sampler
from engine.types.params import SamplingParams
from tests.sampling.rows import CPU, admit


@pytest.fixture
def kernels() -> CPUKernels:
    found = cpu_kernels()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(8))
def test_draws_are_those_of_torch(kernels, seed, threads):
    generator, num_rows = torch.Generator().manual_seed(seed), 64
    random = torch.rand((num_rows, 1 + seed), generator=generator)
    weights_nW = torch.rand((num_rows, 512 * (1 + 5 * seed)), generator=generator) ** (1 + 2 * seed)
    weights_nW[torch.rand(weights_nW.shape, generator=generator) < random[:, :1]] = 0.0
    weights_nW[0], weights_nW[1], weights_nW[2, 100:] = torch.nan, 0.0, torch.nan
    weights_nW[3] = 0.0
    weights_nW[3, -1] = 1e-30
    starts_n = stream_starts(torch.randint(1 << 62, (num_rows,), generator=generator))
    positions_n = torch.randint(1 << 31, (num_rows,), generator=generator)
    # The least number there is, which is more than the first token's part of the weight.
    starts_n[4] = positions_n[4] = 0
    weights_nW[4], weights_nW[4, 0] = 1.0, 1e-30
    expected_n = draw(weights_nW, uniforms(starts_n, positions_n))
    for number in (1, 3):
        threads(number)
        found_n = kernels.draw(weights_nW, weights_nW.shape[1] // BLOCK, starts_n, positions_n)
        assert torch.equal(found_n, expected_n)


@pytest.mark.parametrize("vocab_size", [1, 15, 512, 3000])
def test_a_draw_in_one_loop_is_that_of_the_weights_and_minus_one_where_a_row_has_failed(kernels, vocab_size, threads):
    torch.manual_seed(0)
    logits_nV, inverse_n = 10 * torch.randn((40, vocab_size)), 0.2 + 3 * torch.rand(40)
    logits_nV[3, 0], logits_nV[4, vocab_size - 1], logits_nV[5] = torch.nan, torch.inf, -torch.inf
    width = padded_width(vocab_size)
    _, _, weights_nW = kernels.weighed(logits_nV, inverse_n, width)
    drawn_by = width // BLOCK, stream_starts(torch.randint(1 << 62, (40,))), torch.randint(1 << 31, (40,))
    expected_n = kernels.draw(weights_nW, *drawn_by)
    expected_n[3:6] = -1
    for number in (1, 2, 3):
        threads(number)
        assert torch.equal(kernels.weighed_and_drawn(logits_nV, inverse_n, width, *drawn_by), expected_n)


@pytest.mark.parametrize("vocab_size", [1, 15, 512, 3000])
def test_scores_are_those_of_torch_and_weights_and_sums_near_float64_with_the_same_bits_by_any_threads(
    kernels, vocab_size, threads
):
    torch.manual_seed(0)
    logits_nV, inverse_n = 10 * torch.randn((40, vocab_size)), 0.2 + 3 * torch.rand(40)
    logits_nV[3, 0] = logits_nV[4, vocab_size - 1] = torch.nan
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append((*kernels.weighed(logits_nV, inverse_n, padded_width(vocab_size)), *kernels.log_sums(logits_nV)))
    good = torch.ones(40, dtype=torch.bool)
    good[3:5] = False
    top_n, scores_nW, weights_nW, _, log_n = found[0]
    for other in found[1:]:
        assert all(torch.equal(a[good], b[good]) for a, b in zip(found[0], other, strict=True))
    assert top_n[~good].isnan().all()
    assert torch.equal(top_n[good], logits_nV.amax(-1)[good])
    expected_nW = padded_scores(logits_nV, top_n, inverse_n)[good]
    assert torch.equal(scores_nW[good], expected_nW)
    torch.testing.assert_close(weights_nW[good].double(), weights(expected_nW.double()), rtol=1e-6, atol=2e-35)
    expected_n = (logits_nV.double() - top_n[:, None]).logsumexp(-1)[good]
    torch.testing.assert_close(log_n[good].double(), expected_n, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 1000])
def test_the_likeliest_token_is_the_first_one_of_a_row_whose_maximum_is_finite(kernels, vocab_size):
    logits_nV = torch.randn((8, vocab_size)).round(decimals=1)  # so that some are equal
    last = vocab_size - 1
    logits_nV[0, last], logits_nV[1, 0], logits_nV[2, last], logits_nV[3, :] = (
        torch.nan,
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    logits_nV[4, :last] = -torch.inf
    top_n, token_ids_n = logits_nV.max(-1)
    assert torch.equal(kernels.likeliest(logits_nV), torch.where(top_n.isfinite(), token_ids_n, -1))
    assert torch.equal(kernels.likeliest(logits_nV.T.contiguous().T), kernels.likeliest(logits_nV))


def test_a_batch_of_every_kind_of_row_gets_the_same_tokens_and_plain_rows_get_them_from_the_kernels(
    kernels, monkeypatch
):
    torch.manual_seed(0)
    calls, found = [], []
    for name in ("draw", "likeliest"):
        called = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *given, name=name, called=called: (calls.append(name), called(*given))[1]
        )
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0, presence_penalty=1.0),
        SamplingParams(temperature=1.3, seed=2, top_p=0.8, frequency_penalty=0.5),
        SamplingParams(temperature=0.9, seed=3, top_k=20),
    ]
    steps = [torch.randn((10, 700)) for _ in range(12)]
    steps[3][1, 5] = steps[4][2, 6] = steps[5][7, 7] = torch.nan
    for on_cpu in (None, kernels):
        sampler = Sampler(10, 700, 100, CPU, on_cpu)
        for row in range(10):
            admit(sampler, row, kinds[row % 5])
        rows = np.random.default_rng(0).permutation(10)
        found.append([sampler.sample(one, rows, np.full(10, at)).token_ids_N for at, one in enumerate(steps, 1)])
    assert torch.equal(*map(torch.stack, found))
    assert (found[0][0] >= 0).all()
    assert calls.count("likeliest") == 12
    assert calls.count("draw") == 24  # plain random rows, and those with penalties
