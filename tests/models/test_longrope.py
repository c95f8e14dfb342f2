"""One set of factors of longrope serves all tokens, and the length that is served decides which it is."""

import json
import logging
from pathlib import Path

import pytest
import torch

from engine.llm import LLM
from engine.plugins.families import read_model
from engine.plugins.testing.steps import Driver
from engine.settings.sections import ModelSection
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from tests.models.checkpoints import LONGROPE, build, random_tokens, reference_logits
from tests.models.conftest import load

ORIGINAL, LONGEST = 40, 128
# Phi-4-mini's share of a head that rotates, in a head of 16, and lengths in its proportion.
PHI4 = {
    "rope_parameters": LONGROPE
    | {
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": ORIGINAL,
    },
    "original_max_position_embeddings": ORIGINAL,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def reference():
    return build("phi4-longrope", **PHI4)


@pytest.fixture
def directory(reference, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("served", "length", "most"),
    [(0, 100, LONGEST), (LONGEST, 100, LONGEST), (41, 41, LONGEST), (ORIGINAL, ORIGINAL, ORIGINAL), (9, 9, ORIGINAL)],
)
def test_logits_are_the_references_for_the_length_that_is_served(
    served: int, length: int, most: int, reference, directory: Path
) -> None:
    """The first chunk is short, and has the factors of the whole prompt's length in the reference."""
    spec = read_model(directory, model=ModelSection(max_model_len=served))
    assert spec.max_len == most
    tokens = random_tokens(length, 3)
    expected = reference_logits(reference, tokens)
    driver = Driver(load(spec))
    parts = [tokens[: length // 4], tokens[length // 4 : -3], *([one] for one in tokens[-3:])]
    got = torch.cat([driver.step({"a": part})["a"] for part in parts])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_two_sets_differ(reference, directory: Path) -> None:
    tokens = random_tokens(30, 4)
    expected = reference_logits(reference, tokens)
    long = Driver(load(read_model(directory))).step({"a": tokens})["a"]
    assert (long - expected).abs().max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("served", "kind"), [(0, "long"), (ORIGINAL, "short")])
def test_tokens_are_those_of_generate_and_a_line_says_which_factors(
    served: int, kind: str, reference, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt that begins with a shorter one's pages has the same tokens as without them."""
    caplog.set_level(logging.INFO)
    whole = random_tokens(28 if served else 90, 5)
    prompts = [whole, [*whole[:-5], 7, 8], [*whole, *range(20, 29)]] if not served else [whole, [*whole[:-5], 7]]
    settings = {"model": {"tokenizer": "none", "max_model_len": served}, "kv": {"num_pages": 64, "page_size": 4}}
    with LLM(str(directory), progress=False, config=settings) as llm:
        assert llm.max_model_len == (served or LONGEST)
        got = [list(llm.generate([prompt], GREEDY)[0].token_ids) for prompt in prompts]
    for prompt, tokens in zip(prompts, got, strict=True):
        generated = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert tokens == generated.tolist()
    assert any(f"longrope: all tokens have the {kind} factors" in one for one in caplog.messages)


def test_a_context_beyond_the_checkpoints_is_refused(directory: Path) -> None:
    settings = {"model": {"tokenizer": "none", "max_model_len": LONGEST + 1}}
    with pytest.raises(ConfigError, match=f"the model was trained for {LONGEST} tokens"):
        LLM(str(directory), progress=False, config=settings)


def test_a_published_config_says_it_in_older_words(reference, directory: Path) -> None:
    path = directory / "config.json"
    table = json.loads(path.read_text())
    rotary = table.pop("rope_parameters")
    scaling = {"type": "longrope", **{name: rotary[name] for name in ("short_factor", "long_factor")}}
    words = {"rope_theta": 1e4, "rope_scaling": scaling, "partial_rotary_factor": 0.75}
    expected = read_model(directory).shape
    path.write_text(json.dumps(table | words))
    assert read_model(directory).shape == expected
