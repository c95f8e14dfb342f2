"""The real model's tokens and perplexity are those of transformers, and rounding costs what it is known to."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from callboard import LLM, SamplingParams

pytestmark = pytest.mark.slow

HELD = (Path(__file__).parent / "held.txt").read_text()
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "Once upon a time there was a fox that",
    "The first 5 prime numbers are 2, 3,",
]
NUM_TOKENS = 32
CLEAR = 1e-3  # a lead of the likeliest token that no order of sums reverses


def _perplexity(llm: LLM) -> float:
    (delta, *_) = llm.stream(HELD, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    logprobs = [one.sampled.logprob for one in delta.prompt_logprobs[1:]]
    return math.exp(-sum(logprobs) / len(logprobs))


def test_greedy_tokens_are_those_of_transformers(engine: Callable[..., LLM], reference: LlamaForCausalLM) -> None:
    llm = engine()
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    for prompt, one in zip(PROMPTS, done, strict=True):
        ids = llm._system.codec.encode(prompt).tolist()
        with torch.inference_mode():
            logits = reference(torch.tensor([[*ids, *one.token_ids]])).logits[0, len(ids) - 1 : -1]
        for at, (token, row) in enumerate(zip(one.token_ids, logits, strict=True)):
            likeliest = row.topk(2)
            if likeliest.values[0] - likeliest.values[1] > CLEAR:
                assert token == likeliest.indices[0], f"{prompt!r}, token {at}"


def test_perplexity_of_a_held_text_is_that_of_transformers(
    engine: Callable[..., LLM], reference: LlamaForCausalLM
) -> None:
    llm = engine()
    ids = torch.tensor([llm._system.codec.encode(HELD).tolist()])
    with torch.inference_mode():
        expected = math.exp(float(reference(ids, labels=ids).loss))
    assert _perplexity(llm) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"model": {"quantization": "int8"}}, 1.01),
        ({"kv": {"dtype": "bfloat16"}}, 1.002),
        ({"kv": {"dtype": "int8"}}, 1.01),
        ({"model": {"dtype": "bfloat16"}}, 1.01),
    ],
)
def test_rounding_costs_little_perplexity(settings: dict, most: float, engine: Callable[..., LLM]) -> None:
    ratio = _perplexity(engine(**settings)) / _perplexity(engine())
    assert 1 / most < ratio < most
    assert ratio != 1.0  # it has an effect


def test_invariant_numerics_give_the_same_bits_alone_and_together(engine: Callable[..., LLM]) -> None:
    llm = engine(model={"numerics": "invariant"})
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
    together = llm.generate(PROMPTS, params)
    for prompt, one in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert (alone.token_ids, alone.logprobs) == (one.token_ids, one.logprobs)
