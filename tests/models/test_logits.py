"""Every family gives the reference implementation's logits, however its tokens are cut into steps and pages."""

import pytest
import torch
from torch import Tensor

from engine.plugins.testing.steps import Driver
from tests.models.checkpoints import VARIANTS, random_tokens, reference_logits
from tests.models.conftest import Cases, load

TOLERANCE = 1e-4
LENGTH = 75


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Check that they are at most TOLERANCE apart; a NaN is far from everything."""
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    worst = (got - expected).abs().max().item()
    assert worst <= TOLERANCE, f"logits differ by {worst}"


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_in_one_step(cases: Cases, variant: str, page_size: int):
    tokens = random_tokens(LENGTH, 1)
    driver = Driver(cases[variant].model, page_size, num_pages=200)
    assert_same(driver.step({"a": tokens})["a"], reference_logits(cases[variant].reference, tokens))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_chunked_prefill_then_decode(cases: Cases, variant: str):
    tokens = random_tokens(LENGTH, 2)
    driver = Driver(cases[variant].model)
    chunks = [tokens[start : start + 16] for start in range(0, 48, 16)] + [[token] for token in tokens[48:]]
    parts = [driver.step({"a": chunk})["a"] for chunk in chunks]
    assert_same(torch.cat(parts), reference_logits(cases[variant].reference, tokens))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("shuffled", [True, False])
def test_ragged_batches_of_prefills_and_decodes(cases: Cases, variant: str, shuffled: bool):
    """Three sequences of different lengths, always in different phases, and only the last row of each is sampled."""
    prompts = {name: random_tokens(count, count) for name, count in (("a", 40), ("b", 23), ("c", 61))}
    plan = [{"a": 30}, {"a": 1, "b": 20}, {"a": 8, "b": 1, "c": 33}, {"a": 1, "b": 1, "c": 1}, {"b": 1, "c": 27}]
    driver = Driver(cases[variant].model, page_size=4, num_pages=60, shuffled=shuffled)
    expected = {name: reference_logits(cases[variant].reference, prompts[name]) for name in prompts}
    done = dict.fromkeys(prompts, 0)
    for counts in plan:
        batch = {name: prompts[name][done[name] : done[name] + count] for name, count in counts.items()}
        logits = driver.step(batch, rows="last")
        for name, count in counts.items():
            done[name] += count
            assert_same(logits[name], expected[name][done[name] - 1 : done[name]])
    assert done == {"a": 40, "b": 23, "c": 61}


def test_long_prefill_crosses_query_blocks(cases: Cases):
    """More tokens than the attention backend takes at once, with a window and without."""
    for variant in ("qwen3", "mistral-window"):
        tokens = random_tokens(300, 3)
        driver = Driver(cases[variant].model)
        first = driver.step({"a": tokens[:130]})["a"]
        second = driver.step({"a": tokens[130:]})["a"]
        assert_same(torch.cat((first, second)), reference_logits(cases[variant].reference, tokens))


def test_no_sampled_row_gives_no_logits(cases: Cases):
    driver = Driver(cases["qwen3"].model)
    assert driver.step({"a": [1, 2, 3]}, rows="none")["a"].shape == (0, driver.model.vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(cases: Cases, dtype: torch.dtype):
    tokens = random_tokens(LENGTH, 4)
    for variant in ("llama", "qwen3-tied", "lfm2", "qwen3-5", "falcon-h1"):
        case = cases[variant]
        driver = Driver(load(case.spec, dtype))
        got = driver.step({"a": tokens})["a"]
        expected = reference_logits(case.reference, tokens)
        assert got.dtype == torch.float32
        # 8 bits of mantissa, three layers: a few percent of the logits' spread.
        assert (got - expected).abs().mean() < 0.05 * expected.std()
