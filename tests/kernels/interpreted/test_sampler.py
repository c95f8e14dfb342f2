"""The sampler's kernels: the torch sampler's tokens, and the exact distribution.

Both samplers take the same uniform number of (seed, position) through the same weights in the same order, so they may
differ only where a number falls within about 1e-7 of the border between two tokens: with fixed seeds that happens or it
does not.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.captured import SamplingVariant, array_columns, columns_bytes, tensor_columns
from engine.sampling.constraints import Masks
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.sampling.triton import candidates, sampler
from engine.settings import own_kernels
from engine.types.params import SamplingParams
from tests.sampling.rows import chi_square_excess

CPU = torch.device("cpu")
EOS = 2


def new_sampler(kind: str, monkeypatch: pytest.MonkeyPatch, num_rows: int, vocab_size: int, max_len: int) -> Sampler:
    monkeypatch.setenv(own_kernels.VARIABLE, kind)
    return Sampler(num_rows, vocab_size, max_len, CPU)


def tokens_of_both(
    monkeypatch: pytest.MonkeyPatch,
    wishes: Sequence[SamplingParams],
    logits_NV: Tensor,
    steps: int = 2,
    max_len: int = 512,
) -> tuple[Tensor, Tensor]:
    """Return token_ids [steps, N] of the kernels and of torch; each counts its own tokens."""
    num_rows, vocab_size = logits_NV.shape
    prompt = np.array([0, 0, EOS, 1, *range(vocab_size // 3, vocab_size // 2)], np.int32) % vocab_size
    found = []
    for kind in ("triton", "torch"):
        one = new_sampler(kind, monkeypatch, num_rows, vocab_size, max_len)
        for row, params in enumerate(wishes):
            one.admit((Newcomer(row, params, prompt, 3),), (EOS,) if vocab_size > EOS else ())
        rows = np.arange(num_rows)
        ids = [one.sample(logits_NV, rows, np.full(num_rows, len(prompt) + step)).token_ids_N for step in range(steps)]
        found.append(torch.stack(ids))
    return found[0], found[1]


def normal_logits(num_rows: int, vocab_size: int, scale: float = 3.0) -> Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(vocab_size)) * scale


def every_kind(seed: int = 0) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=seed + 1),
        SamplingParams(seed=seed + 2, temperature=0.2),
        SamplingParams(seed=seed + 3, temperature=2.0),
        SamplingParams(seed=seed + 4, top_k=1),
        SamplingParams(seed=seed + 5, top_k=7),
        SamplingParams(seed=seed + 6, top_k=100, temperature=1.7),
        SamplingParams(seed=seed + 7, top_p=0.9),
        SamplingParams(seed=seed + 8, top_p=1e-6),
        SamplingParams(seed=seed + 9, top_p=0.999, temperature=3.0),
        SamplingParams(seed=seed + 10, min_p=0.1),
        SamplingParams(seed=seed + 11, min_p=1.0),
        SamplingParams(seed=seed + 12, min_p=0.001, top_p=0.95),
        SamplingParams(seed=seed + 13, top_k=20, top_p=0.8, min_p=0.01, temperature=1.3),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=-1.0),
        SamplingParams(seed=seed + 14, repetition_penalty=0.7, frequency_penalty=0.5),
        SamplingParams(seed=seed + 15, repetition_penalty=1.2, presence_penalty=1.0, top_k=12, top_p=0.9),
        SamplingParams(temperature=0.0, min_tokens=400),
        SamplingParams(seed=seed + 16, min_tokens=400, min_p=0.05),
    ]


@pytest.mark.parametrize(
    "vocab_size,dtype",
    [(1, torch.float32), (2, torch.bfloat16), (300, torch.float32), (300, torch.bfloat16), (5000, torch.bfloat16)],
)
def test_every_kind_of_request_in_one_batch_gets_torchs_tokens(monkeypatch, vocab_size, dtype):
    wishes = every_kind(seed=1000 * vocab_size)
    found, expected = tokens_of_both(monkeypatch, wishes, normal_logits(len(wishes), vocab_size).to(dtype), steps=1)
    assert torch.equal(found, expected)
    assert (found >= 0).all()


@pytest.mark.parametrize("wishes", every_kind(seed=70), ids=lambda one: f"{one.top_k} {one.top_p} {one.min_p}")
def test_a_batch_of_one_row(monkeypatch, wishes):
    found, expected = tokens_of_both(monkeypatch, [wishes], normal_logits(1, 700), steps=1)
    assert torch.equal(found, expected)


def test_bias_makes_and_unmakes_the_most_likely_token(monkeypatch):
    wishes = [
        SamplingParams(temperature=0.0, logit_bias={5: 100.0, 299: 50.0}),
        SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(1, 300), -100.0)),
        SamplingParams(seed=3, logit_bias={token: 2.0 * (token % 7) for token in range(200)}, presence_penalty=0.5),
        # More of a row's entries than a program looks at in one go.
        SamplingParams(seed=4, top_k=5, logit_bias={token: 1.0 + token % 3 for token in range(290)}),
    ]
    found, expected = tokens_of_both(monkeypatch, wishes, normal_logits(4, 300), steps=4)
    assert torch.equal(found, expected)
    assert found[:, :2].tolist() == [[5, 0]] * 4


def test_rows_that_cannot_be_sampled_are_marked_and_disturb_no_other(monkeypatch):
    wishes = every_kind()
    logits = normal_logits(len(wishes), 1500)
    whole = tokens_of_both(monkeypatch, wishes, logits, steps=1)[0]
    for at, value in ((3, torch.nan), (700, torch.inf), (slice(None), -torch.inf)):
        broken = logits.clone()
        broken[::2, at] = value
        found, expected = tokens_of_both(monkeypatch, wishes, broken, steps=1)
        assert torch.equal(found, expected)
        assert (found[0, ::2] == -1).all()
        assert torch.equal(found[0, 1::2], whole[0, 1::2])


def test_a_token_of_weight_zero_is_never_drawn(monkeypatch):
    wishes = [one for one in every_kind() if one.temperature > 0 and not one.min_tokens]
    logits = torch.full((len(wishes), 1200), -torch.inf)
    logits[:, 1111] = -5.0
    found, expected = tokens_of_both(monkeypatch, wishes, logits, steps=1)
    assert (found == 1111).all()
    logits[:, [3, 600]] = -5.0
    found, expected = tokens_of_both(monkeypatch, wishes, logits, steps=2)
    assert torch.equal(found, expected)
    assert set(found.flatten().tolist()) == {3, 600, 1111}


def test_equal_logits_are_not_told_apart_by_a_cut(monkeypatch):
    """All tokens are ties: greedy takes the first, every cut keeps all."""
    wishes = [SamplingParams(temperature=0.0), *(SamplingParams(seed=s, top_k=1) for s in range(12))]
    wishes += [SamplingParams(seed=s, top_p=0.01) for s in range(12)]
    found, expected = tokens_of_both(monkeypatch, wishes, torch.full((len(wishes), 900), 1.5), steps=1)
    assert torch.equal(found, expected)
    assert found[0, 0] == 0
    assert len(set(found[0, 1:13].tolist())) > 10  # twelve seeds
    assert torch.equal(found[0, 13:], found[0, 1:13])


def far_cuts() -> list[SamplingParams]:
    """Cuts that are found in a histogram, at both ends of a distribution and between, beside some that are not."""
    shares = (1e-9, 0.3, 0.95, 0.9999999, 1 - 1e-15)
    return [
        *(SamplingParams(seed=seed, top_p=share) for seed, share in enumerate(shares)),
        SamplingParams(seed=5, top_k=300),
        SamplingParams(seed=6, top_k=300, top_p=0.7),
        SamplingParams(seed=7, min_p=1e-4, top_p=0.9),
        SamplingParams(seed=8, top_k=2, top_p=0.7),
        SamplingParams(seed=9, min_p=1e-3),
    ]


@pytest.mark.parametrize(
    "kind", ["one bin", "spread", "ties", "few values", "one likely token far above others", "most tokens forbidden"]
)
def test_cuts_far_from_their_bounds_in_rows_of_several_parts(monkeypatch, kind):
    monkeypatch.setattr(candidates, "TOKENS_OF_A_PART", 256)
    monkeypatch.setattr(candidates, "LISTED_AT_ONCE", 128)
    wishes = far_cuts()
    logits = normal_logits(len(wishes), 1100, scale={"one bin": 1e-3, "spread": 50.0}.get(kind, 3.0))
    if kind == "ties":
        logits = torch.full_like(logits, -2.0)
    elif kind == "few values":
        logits = logits.round()
    elif kind == "one likely token far above others":
        logits = logits * 1e-3
        logits[:, 700] = 9.0
    elif kind == "most tokens forbidden":
        logits[:, torch.arange(1100) % 7 != 3] = -torch.inf
    found, expected = tokens_of_both(monkeypatch, wishes, logits, steps=1)
    assert torch.equal(found, expected)


def test_histograms_are_made_only_for_rows_that_need_them(monkeypatch):
    """1,100 tokens are three blocks."""
    wishes = [SamplingParams(top_k=3, top_p=0.9), SamplingParams(min_p=0.1), SamplingParams(), *far_cuts()]
    one = new_sampler("triton", monkeypatch, len(wishes), 1100, 512)
    for row, params in enumerate(wishes):
        one.admit((Newcomer(row, params, np.array([1], np.int32), 1),), (EOS,))
    assert one.kernels is not None
    needed = [one.kernels.plan(np.array([row]), np.zeros(1, np.bool_))[0].far_cuts for row in range(len(wishes))]
    assert needed == [False] * 3 + [True] * 8 + [False] * 2


def test_rows_apart_and_a_batch_in_another_order(monkeypatch):
    """Logits may be columns of a wider tensor; a row's token does not depend on where in the batch it stands."""
    wishes = every_kind()
    logits = normal_logits(len(wishes), 600)
    wide = torch.full((len(wishes), 700), 99.0)
    wide[:, :600] = logits
    one = new_sampler("triton", monkeypatch, len(wishes), 600, 512)
    for row, params in enumerate(wishes):
        one.admit((Newcomer(row, params, np.array([1], np.int32), 1),), (EOS,))
    rows = np.arange(len(wishes))
    first = one.sample(wide[:, :600], rows, np.full(len(rows), 9)).token_ids_N
    for row, params in enumerate(wishes):  # once more without the counts of the first call
        one.admit((Newcomer(row, params, np.array([1], np.int32), 1),), (EOS,))
    order = np.random.default_rng(0).permutation(len(rows))
    second = one.sample(logits[order], order, np.full(len(rows), 9)).token_ids_N
    assert torch.equal(second, first[order])


def test_few_rows_at_once_and_wide_counts_over_two_steps(monkeypatch):
    wishes = every_kind()
    logits = normal_logits(len(wishes), 300)
    monkeypatch.setattr(sampler, "TOKENS_AT_ONCE", 900)  # three rows
    found, expected = tokens_of_both(monkeypatch, wishes, logits, max_len=40_000)  # counts of 32 bits
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "params,num_draws",
    [
        (SamplingParams(temperature=1.2), 250),
        (SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1), 40),  # slow to interpret
    ],
    ids=["temperature", "cuts"],
)
def test_draws_follow_the_distribution(monkeypatch, params, num_draws):
    """Against float64 and a sort; from bfloat16 logits."""
    vocab_size = 40
    logits = normal_logits(1, vocab_size, scale=1.5).bfloat16()
    one = new_sampler("triton", monkeypatch, num_draws, vocab_size, 512)
    for row in range(num_draws):
        one.admit((Newcomer(row, params.replace(seed=row), np.array([1], np.int32), 1),), (EOS,))
    drawn = one.sample(logits.expand(num_draws, -1), np.arange(num_draws), np.full(num_draws, 7)).token_ids_N

    likely = (logits[0].double() / params.temperature).softmax(-1)
    likely[likely < params.min_p * likely.max()] = 0.0
    order = likely.argsort(descending=True)
    if params.top_k:
        likely[order[params.top_k :]] = 0.0
    ahead = likely[order].cumsum(-1) - likely[order]
    likely[order[ahead >= params.top_p * likely.sum()]] = 0.0
    assert chi_square_excess(drawn.numpy(), likely / likely.sum()) < 3


def test_the_columns_of_a_captured_step_give_the_same_tokens(monkeypatch):
    """Rows without cuts and penalties, and padding, stand among those that have them."""
    monkeypatch.setattr(sampler, "TOKENS_AT_ONCE", 6000)  # ten rows
    wishes = [one for one in every_kind() if not one.min_tokens]
    num_rows, size, vocab_size = len(wishes), len(wishes) + 3, 600
    packed = torch.zeros(columns_bytes(size), dtype=torch.uint8)
    one = new_sampler("triton", monkeypatch, num_rows, vocab_size, 512)
    uniform = one.captured(tensor_columns(packed, size))
    rows = np.random.default_rng(0).permutation(num_rows)
    most_likely = SamplingParams(temperature=0.0)
    plain = np.array([row for row in rows if wishes[row].replace(seed=None, temperature=0.0) == most_likely])
    greedy = plain[[wishes[row].greedy for row in plain]]
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    cut = np.array([row for row in rows if wishes[row].replace(**penalties) == wishes[row]])
    logits = normal_logits(size, vocab_size).bfloat16()
    variants = (
        (SamplingVariant.GREEDY, greedy),
        (SamplingVariant.TEMPERATURE, plain),
        (SamplingVariant.CUT, cut),
        (SamplingVariant.FULL, rows),
    )
    for variant, chosen in variants:
        positions = np.full(len(chosen), 9)
        found = []
        for captured in (True, False):
            for row, params in enumerate(wishes):
                one.admit((Newcomer(row, params, np.array([1, 5, 6], np.int32), 2),), (EOS,))
            if captured:
                assert uniform.variant_of(chosen, positions) == variant
                uniform.fill(array_columns(packed.numpy(), size), chosen)
                found.append(uniform.pick(variant, logits, torch.full((size,), 9))[: len(chosen)])
            else:
                found.append(one.sample(logits[: len(chosen)], chosen, positions).token_ids_N)
        assert torch.equal(found[0], found[1])
        assert (found[0] >= 0).all()


def test_tokens_that_a_grammar_forbids_are_never_picked(monkeypatch):
    """Every other row may take two tokens only, one of them what ends an output; the first of them only that."""
    wishes = every_kind()
    logits = normal_logits(len(wishes), 1500)
    words = np.zeros((len(wishes) // 2, -(-1500 // 32)), dtype=np.int32)
    words[:, 0] = 1 << EOS
    words[1:, 700 // 32] = 1 << 700 % 32
    masks = Masks(torch.arange(0, len(wishes), 2), torch.from_numpy(words), {})
    found = []
    for kind in ("triton", "torch"):
        one = new_sampler(kind, monkeypatch, len(wishes), 1500, 64)
        for row, params in enumerate(wishes):
            one.admit((Newcomer(row, params, np.array([5, 6, 7], np.int32), 3),), (EOS,))
        positions = np.full(len(wishes), 3)
        found.append(one.sample(logits, np.arange(len(wishes)), positions, masks).token_ids_N)
    assert torch.equal(*found)
    assert found[0][0] == EOS
    assert set(found[0][::2].tolist()) == {EOS, 700}
