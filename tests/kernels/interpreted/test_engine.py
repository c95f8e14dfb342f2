"""The engine from prompts to tokens, with kernels and without: the same tokens, whatever is asked of the sampler."""

from callboard import LLM, SamplingParams
from engine.kernels import choice

PROMPTS = ["def f(x):\n    return", "import numpy as", "class A:", "for i in range(", "x = [1, 2"]
WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={400: 3.0}, logprobs=2),
    SamplingParams(seed=3, min_p=0.05, min_tokens=3),
]


def test_same_tokens(monkeypatch):
    outputs = []
    for kind in ("triton", "torch"):
        monkeypatch.setenv(choice.VARIABLE, kind)
        wishes = [one.replace(max_tokens=5, ignore_eos=True) for one in WISHES]
        # Prompts longer than a chunk, so that steps mix both phases.
        sections = {"model": {"dtype": "float32"}, "scheduler": {"prefill_chunk": 4}, "device": {"kind": "cpu"}}
        with LLM(progress=False, config={"kv": {"num_pages": 64}, **sections}) as llm:
            outputs.append([one.token_ids for one in llm.generate(PROMPTS, wishes)])
    assert outputs[0] == outputs[1]
    assert all(len(one) == 5 for one in outputs[0])
