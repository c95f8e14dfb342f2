"""The whole model with kernels gives the reference implementation's logits, in prefills, decodes and both together."""

import pytest
import torch

from engine.kernels import choice
from engine.layers.linear import VocabLinear
from engine.plugins.families import read_model
from engine.plugins.testing.steps import Driver
from engine.settings import own_kernels
from tests.models.checkpoints import build, random_tokens, reference_logits, save
from tests.models.conftest import load

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    monkeypatch.setenv(own_kernels.VARIABLE, "triton")


PLAIN = ["llama-biases", "llama-gelu", "llama-gelu-tanh", "llama-head-dim", "qwen3-tied", "qwen3-yarn-bias"]
# Norms of 1 + weight, of all heads at once, rotation of a part of a head and of none, and no RMS norm at all.
VARIANTS = [*PLAIN, "gemma3", "olmo2", "glm4", "smollm3", "gpt2"]
# One of each kind of recurrent layer; gates before norms and behind them, and without.
VARIANTS += ["lfm2", "qwen3-5", "granite4-hybrid", "falcon-h1", "nemotron-h"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(tmp_path, variant):
    reference = build(variant)
    model = load(read_model(save(reference, tmp_path)))
    driver = Driver(model, page_size=4)
    prompts = {name: random_tokens(count, count) for name, count in (("a", 6), ("b", 7))}
    expected = {name: reference_logits(reference, prompts[name]) for name in prompts}
    found = {"a": [], "b": []}
    for counts in ({"a": 4}, {"a": 1, "b": 5}, {"a": 1, "b": 1}, {"b": 1}):
        done = {name: sum(len(part) for part in found[name]) for name in counts}
        batch = {name: prompts[name][done[name] : done[name] + count] for name, count in counts.items()}
        for name, logits in driver.step(batch).items():
            found[name].append(logits)
    for name in prompts:
        assert (torch.cat(found[name]) - expected[name]).abs().max() <= 1e-4


class OneOfTwo:
    """A rank whose sums and products with others are left to the test."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_the_embeddings_of_two_ranks_sum_to_the_whole():
    vocab_size, width = 9, 6
    whole = torch.arange(1.0, vocab_size * width + 1).view(vocab_size, width)
    kernels = choice.choose_kernels(CPU)
    assert kernels is not None
    token_ids = torch.tensor([8, 0, 4, 5, 5])
    found = torch.zeros(5, width)
    for rank in (0, 1):
        part = VocabLinear(vocab_size, width, OneOfTwo(rank), CPU, torch.float32)
        held = whole[part.first : part.first + part.rows]
        part.weight[: len(held)] = held
        one = part.embed(token_ids, kernels)
        assert torch.equal(one, part.embed(token_ids))
        found += one
    assert torch.equal(found, whole[token_ids])
