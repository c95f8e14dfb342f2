"""Ids in a checkpoint's files that the model does not have reach no request."""

import json
from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from tests.models.checkpoints import VOCAB, build, random_tokens, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
HELD = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12)
PROMPTS = [random_tokens(9, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(build("llama"), tmp_path_factory.mktemp("checkpoint"))
    (directory / "generation_config.json").unlink()
    return directory


def streams(directory: Path, eos_token_id: object) -> list[list[int]]:
    """Greedy streams, each beside one that holds off EOS: its row is the one before."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": eos_token_id}))
    with LLM(directory, progress=False, config={"kv": {"num_pages": 64}, "model": {"tokenizer": "none"}}) as llm:
        prompts = [prompt for one in PROMPTS for prompt in (one, one)]
        return [list(done.token_ids) for done in llm.generate(prompts, [HELD, GREEDY] * len(PROMPTS))]


def test_an_eos_id_that_the_model_does_not_have_changes_no_request(checkpoint: Path):
    expected = streams(checkpoint, [2])
    # In the logits of the row after each held one, the ids that its greedy neighbour gives, and far beyond all rows.
    next_row = [VOCAB + token for stream in expected[1::2] for token in stream]
    assert streams(checkpoint, [2, *next_row]) == expected
    assert streams(checkpoint, [2, 1 << 40]) == expected
