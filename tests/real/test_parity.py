"""The real model's tokens and perplexity are those of transformers, and rounding costs what it is known to."""

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.control.system import System
from engine.features.lora.files import NAME, AdapterRules, read_adapter
from engine.messages import RequestOptions
from server.extensions.bench import llama_cpp
from tests.features.lora.made import make_adapter, merged

pytestmark = pytest.mark.slow

HELD = (Path(__file__).parent / "held.txt").read_text()
# Prose, a list of terms, Markdown and Python; with HELD 2,590 tokens.
TEXTS = [HELD, *(one.read_text() for one in sorted((Path(__file__).parent / "texts").glob("*.txt")))]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "Once upon a time there was a fox that",
    "The first 5 prime numbers are 2, 3,",
]
NUM_TOKENS = 32
CLEAR = 1e-3  # a lead of the likeliest token that no order of sums reverses
LLAMA_CPP_CLEAR = 0.5  # and that inputs rounded to 8 bits do not reverse


def _logprobs(llm: LLM, text: str = HELD) -> list[float]:
    (delta, *_) = llm.stream(text, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    return [one.sampled.logprob for one in delta.prompt_logprobs[1:]]


def _perplexity(llm: LLM) -> float:
    return math.exp(-np.mean(_logprobs(llm)))


def _first_other(reference: PreTrainedModel, ids: Sequence[int], answer: Sequence[int], clear: float) -> int | None:
    """Return the place of the first token of an answer that is not the likeliest by the reference, after the tokens
    before it, though that leads by so much; None for none."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
    likeliest = logits.topk(2)
    leads = likeliest.values[:, 0] - likeliest.values[:, 1] > clear
    others = likeliest.indices[:, 0] != torch.tensor(answer)
    return next(iter((leads & others).nonzero().flatten().tolist()), None)


def test_greedy_tokens_are_those_of_transformers(engine: Callable[..., LLM], reference: LlamaForCausalLM) -> None:
    llm = engine()
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    for prompt, one in zip(PROMPTS, done, strict=True):
        ids = llm._system.codec.encode(prompt).tolist()
        assert _first_other(reference, ids, one.token_ids, CLEAR) is None, repr(prompt)


def test_llama_cpp_reads_the_file_to_the_same_tokens(real: Path, reference: LlamaForCausalLM) -> None:
    if not (command := llama_cpp.find("", sys.executable)):
        pytest.skip("llama.cpp is not here: pip install xllamacpp")
    with closing(llama_cpp.LlamaServer(command, real, 1, 512, 2)) as server:
        for prompt in PROMPTS:
            ids = server.tokens(prompt)
            (answer,) = server.complete([ids], NUM_TOKENS, return_tokens=True)
            assert len(answer["tokens"]) == NUM_TOKENS
            assert _first_other(reference, ids, answer["tokens"], LLAMA_CPP_CLEAR) is None, repr(prompt)


def test_llama_cpp_scores_the_held_text_alike(real: Path, engine: Callable[..., LLM]) -> None:
    """Its server scores what may come next, so each token takes a request: some tokens must do."""
    if not (command := llama_cpp.find("", sys.executable)):
        pytest.skip("llama.cpp is not here: pip install xllamacpp")
    ours = _logprobs(engine())
    with closing(llama_cpp.LlamaServer(command, real, 1, 512, 2)) as server:
        ids = server.tokens(HELD)
        assert len(ids) == len(ours) + 1
        apart = []
        for end in range(8, len(ids), 8):
            (answer,) = server.complete([ids[:end]], 1, cache_prompt=True, n_probs=500)
            likely = answer["completion_probabilities"][0]["top_logprobs"]
            apart += [one["logprob"] - ours[end - 1] for one in likely if one["id"] == ids[end]]
    assert len(apart) > 30
    assert abs(np.mean(apart)) < 0.03
    assert max(map(abs, apart)) < 1


async def test_an_adapter_gives_the_tokens_of_merged_weights(
    real: Path, reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    tuned = merged(reference, make_adapter(tmp_path / "tuned", reference, seed=1))
    tables = {"model": {"path": str(real), "max_model_len": 512}, "kv": {"num_pages": 64}, "device": {"kind": "cpu"}}
    config = build_config(Config(), tables | {"lora": {"folder": str(tmp_path), "max_adapters": 1, "max_rank": 8}})
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    async with asyncio.timeout(600):
        system = System(config)
        await system.start()
        try:
            rules = msgspec.msgpack.decode(system.engine.facts[NAME], type=AdapterRules)
            with_it = RequestOptions(parts=read_adapter(tmp_path / "tuned", rules).parts)
            for prompt in PROMPTS:
                ids = system.codec.encode(prompt).tolist()
                answers = []
                for options in (RequestOptions(), with_it):
                    delta = await system.ingress.open(ids, params, options).collect()
                    answers.append(np.frombuffer(delta.token_ids, np.int32).tolist())
                assert answers[0] != answers[1]
                assert _first_other(reference, ids, answers[0], CLEAR) is None, repr(prompt)
                assert _first_other(tuned, ids, answers[1], CLEAR) is None, repr(prompt)
        finally:
            await system.stop()


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


def test_int8_costs_half_a_percent_of_perplexity_at_most_over_several_texts(engine: Callable[..., LLM]) -> None:
    """The perplexity of a single text of 300 to 500 tokens changes by up to 0.9 %, to either side."""
    rounded, exact = engine(model={"quantization": "int8"}), engine()
    ours = np.concatenate([_logprobs(rounded, text) for text in TEXTS])
    apart = np.concatenate([_logprobs(exact, text) for text in TEXTS]) - ours
    assert len(apart) > 2500
    assert abs(math.expm1(np.mean(apart))) < 0.005


def test_invariant_numerics_give_the_same_bits_alone_and_together(engine: Callable[..., LLM]) -> None:
    llm = engine(model={"numerics": "invariant"})
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
    together = llm.generate(PROMPTS, params)
    for prompt, one in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert (alone.token_ids, alone.logprobs) == (one.token_ids, one.logprobs)
