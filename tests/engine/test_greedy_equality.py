"""The whole engine against transformers: float32 greedy tokens are the same, whatever else is in the batch.

For every family: a ragged batch of 8 prompts, 16 tokens each (64 for two families), requests that join while others
run, and in turn pages of 1 and prompts in chunks of 16, or pages of 16 and whole prompts.  Some have all pairs.
"""

import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from callboard import LLM, SamplingParams
from tests.models.checkpoints import VARIANTS, build, random_tokens, reference_logits, save

PROMPT_LENGTHS = (1, 7, 15, 16, 17, 33, 48, 100)
OUTPUT_LEN = 16
LONG_OUTPUT_LEN = 64
LONG = ("gemma3", "qwen3")  # with windows that prompt and output together pass, and plain


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(variant: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    model = build(variant)
    return save(model, tmp_path_factory.mktemp(variant)), model


# The reference has the short factors of longrope up to here, and the engine has one set for all tokens.
UP_TO = {"phi4-longrope": {"max_model_len": 256}}
Greedy = Callable[[list[int], list[int]], bool]


@pytest.fixture(scope="module")
def greedy(checkpoint: tuple[Path, PreTrainedModel]) -> Greedy:
    """Whether an output is what ``generate`` gives the prompt alone, EOS ignored: each token is the likeliest one
    behind those before it.  One forward pass says so of a whole output; ``generate`` takes one for each token."""
    _, model = checkpoint

    @cache
    def is_greedy(prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
        logits_TV = reference_logits(model, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        return logits_TV.argmax(-1).tolist() == list(output)

    return lambda prompt, output: is_greedy(tuple(prompt), tuple(output))


def prompts() -> list[list[int]]:
    return [random_tokens(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]


PAIRS = [(1, 16), (16, 512), (1, 512), (16, 16)]  # tokens of a page, and of a chunk


def pair_of(variant: str) -> tuple[int, int]:
    """The pair of a variant in turn."""
    return PAIRS[sorted(VARIANTS).index(variant) % 2]


def test_greedy_tokens_equal_generate(variant: str, checkpoint: tuple[Path, PreTrainedModel], greedy: Greedy) -> None:
    check(variant, checkpoint[0], greedy, *pair_of(variant))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*LONG, "qwen3-5"], indirect=True)  # the last one has states as well
@pytest.mark.parametrize(("page_size", "prefill_chunk"), PAIRS)
def test_so_they_do_with_all_pairs(
    variant: str, checkpoint: tuple[Path, PreTrainedModel], greedy: Greedy, page_size: int, prefill_chunk: int
) -> None:
    check(variant, checkpoint[0], greedy, page_size, prefill_chunk)


def check(variant: str, directory: Path, greedy: Greedy, page_size: int, prefill_chunk: int) -> None:
    length = LONG_OUTPUT_LEN if variant in LONG else OUTPUT_LEN
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    with LLM(
        directory,
        progress=False,
        config={
            "kv": {"page_size": page_size, "num_pages": 2048 // page_size},
            "scheduler": {"prefill_chunk": prefill_chunk, "max_step_tokens": 64},
            "model": {"dtype": "float32", "tokenizer": "none"} | UP_TO.get(variant, {}),
        },
    ) as llm:
        together = [completion.token_ids for completion in llm.generate(prompts(), params)]
        assert [len(output) for output in together] == [length] * len(PROMPT_LENGTHS)
        wrong = [index for index, pair in enumerate(zip(prompts(), together, strict=True)) if not greedy(*pair)]
        assert not wrong, f"prompts whose tokens are not the reference's: {wrong}"
        assert joining_midway(llm, params) == together


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
