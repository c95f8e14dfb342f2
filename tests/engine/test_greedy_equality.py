"""The whole engine against transformers: float32 greedy tokens are the same, whatever else is in the batch.

For every family: a ragged batch of 8 prompts, 64 tokens each, chunked prefill on (16) and off, pages of 1 and 16
tokens, requests that join while others run.
"""

import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from callboard import LLM, SamplingParams
from tests.models.checkpoints import VARIANTS, build, random_tokens, save

PROMPT_LENGTHS = (1, 7, 15, 16, 17, 33, 48, 100)
OUTPUT_LEN = 64


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    model = build(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, PreTrainedModel]) -> list[list[int]]:
    """What ``generate`` gives each prompt on its own; EOS is ignored on both sides."""
    _, model = checkpoint
    outputs = []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            result = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=OUTPUT_LEN,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs


def prompts() -> list[list[int]]:
    return [random_tokens(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefill_chunk", [16, 512])
def test_greedy_tokens_equal_generate(
    checkpoint: tuple[Path, PreTrainedModel], expected: list[list[int]], page_size: int, prefill_chunk: int
) -> None:
    directory, _ = checkpoint
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with LLM(
        directory,
        progress=False,
        config={
            "kv": {"page_size": page_size, "num_pages": 2048 // page_size},
            "scheduler": {"prefill_chunk": prefill_chunk, "max_step_tokens": 64},
            "model": {"dtype": "float32", "tokenizer": "none"},
        },
    ) as llm:
        together = [completion.token_ids for completion in llm.generate(prompts(), params)]
        assert together == expected
        assert joining_midway(llm, params) == expected


def joining_midway(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """Each prompt from a thread of its own, a few milliseconds apart, so that they join a running batch."""
    outputs: dict[int, list[int]] = {}

    def client(index: int, prompt: list[int]) -> None:
        outputs[index] = llm.generate(prompt, params)[0].token_ids

    threads = [threading.Thread(target=client, args=pair) for pair in enumerate(prompts())]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    return [outputs[index] for index in range(len(threads))]
