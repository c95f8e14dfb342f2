"""A model whose layers differ in their heads gives transformers' tokens in every way to keep and move its pages."""

from pathlib import Path
from typing import Any

import pytest

from callboard import LLM, SamplingParams
from engine.types.errors import ConfigError
from tests.models.checkpoints import LAYERED, build, random_tokens, reference_logits, save

pytestmark = pytest.mark.slow
NUM = 12
PREFIX = random_tokens(37, 3)
PROMPTS = [PREFIX + random_tokens(5 + 3 * number, number) for number in range(5)]
WAYS: dict[str, dict[str, Any]] = {
    "pages first": {"kv": {"layout": "page_first", "num_pages": 96, "page_size": 16}},
    "odd chunks and pages of 4": {"kv": {"page_size": 4, "num_pages": 400}, "scheduler": {"prefill_chunk": 5}},
    "few pages": {"kv": {"page_size": 4, "num_pages": 30}},
    "a host tier": {"kv": {"page_size": 4, "num_pages": 30, "num_host_pages": 200}},
    "two ranks": {"device": {"kind": "cpu", "tensor_parallel": 2, "threads": 1}},
    "drafts": {"plugins": {"proposer": "ngram"}},
    "narrow pages": {"kv": {"dtype": "float16"}},
}


@pytest.mark.parametrize("variant", LAYERED)
def test_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = build(variant)
    directory = save(reference, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True)
    expected: list[list[int]] = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM):
            tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
        expected.append(tokens[len(prompt) :])
    for way, tables in WAYS.items():
        config = {"model": {"tokenizer": "none", "dtype": "float32"}, "device": {"kind": "cpu"}} | tables
        with LLM(directory, progress=False, config=config) as llm:
            twice = [[list(one.token_ids) for one in llm.generate(PROMPTS, params)] for _ in range(2)]
        if way == "narrow pages":
            assert [[len(one) for one in turn] for turn in twice] == [[NUM] * len(PROMPTS)] * 2
        else:
            assert twice == [expected] * 2, way


REFUSED: dict[str, dict[str, Any]] = {
    "scales have no room": {"kv": {"dtype": "int8"}},
    "numerics=invariant": {"model": {"numerics": "invariant"}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_there_is_refused(said: str, tmp_path: Path) -> None:
    directory = save(build("gemma4"), tmp_path)
    plain: dict[str, Any] = {"model": {"tokenizer": "none", "dtype": "float32"}, "device": {"kind": "cpu"}}
    config = plain | {name: plain.get(name, {}) | keys for name, keys in REFUSED[said].items()}
    with pytest.raises(ConfigError, match=said), LLM(directory, progress=False, config=config):
        pass
