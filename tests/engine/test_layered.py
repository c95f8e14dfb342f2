"""A model whose layers differ in their heads gives transformers' tokens in every way to keep and move its pages."""

import json
from pathlib import Path
from typing import Any

import pytest

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.startup.preview import preview_attention
from engine.types.errors import ConfigError, WeightsError
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
    "with the same heads in all layers, support it": {"model": {"numerics": "invariant"}},
    "whose heads differ by layer, take no adapters": {"lora": {"folder": "."}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_there_is_refused(said: str, tmp_path: Path) -> None:
    directory = save(build("gemma4"), tmp_path)
    plain: dict[str, Any] = {"model": {"tokenizer": "none", "dtype": "float32"}, "device": {"kind": "cpu"}}
    config = plain | {name: plain.get(name, {}) | keys for name, keys in REFUSED[said].items()}
    with pytest.raises(ConfigError, match=said), LLM(directory, progress=False, config=config):
        pass


WRONG: dict[str, dict[str, Any]] = {
    "vocab_size_per_layer_input is 200, expected": {"vocab_size_per_layer_input": 200},
    "layer 3 to have heads as layer 1": {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_config_without_a_meaning_is_refused(said: str, tmp_path: Path) -> None:
    directory = save(build("gemma4"), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | WRONG[said]))
    with pytest.raises(WeightsError, match=said), LLM(directory, progress=False, config={"device": {"kind": "cpu"}}):
        pass


def test_backends_are_measured_in_the_widest_layers(tmp_path: Path) -> None:
    tables = {"model": {"path": str(save(build("gemma4"), tmp_path))}, "device": {"kind": "cpu"}}
    spec, *_ = preview_attention(build_config(Config(), tables))
    assert (spec.head_size, spec.num_layers, spec.heads) == (32, 2, ())
