"""The whole engine on two and four ranks: the tokens of one rank, and of the reference, wherever the ranks run.

Two KV heads and a vocabulary of 259: four ranks hold copies of heads, and no number of ranks divides the vocabulary.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from callboard import LLM, SamplingParams
from engine.types.errors import ConfigError
from tests.models.checkpoints import build, random_tokens, save
from tests.sampling.borders import clear_of_borders

FAMILIES = ["llama", "mistral-window", "qwen2", "qwen3-tied"]
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((1, 5, 17, 40))]
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=NUM_NEW, ignore_eos=True)
Checkpoint = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Family -> its directory, and what the reference says to each prompt."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def make(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            reference = build(family)
            said = []
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                mask = torch.ones_like(ids)  # else the reference takes the pad token in a prompt for padding
                out = reference.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0
                )
                said.append(out[0, len(prompt) :].tolist())
            made[family] = save(reference, tmp_path_factory.mktemp(family), sharded=True), said
        return made[family]

    return make


def engine(directory: Path, num_ranks: int, executor: str, **model: str) -> LLM:
    return LLM(
        directory,
        progress=False,
        config={
            "model": {"tokenizer": "none", **model},
            "device": {"tensor_parallel": num_ranks, "threads": 1},
            "kv": {"num_pages": 64, "page_size": 4},
            "scheduler": {"max_running": 8, "prefill_chunk": 16},
            "placement": {"executor": executor},
        },
    )


def generated(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_the_reference_says(checkpoint: Checkpoint, family: str, num_ranks: int) -> None:
    directory, expected = checkpoint(family)
    with engine(directory, num_ranks, "inline") as llm:
        assert generated(llm, GREEDY) == expected
        assert generated(llm, GREEDY) == expected, "again, with prefixes from the cache"


HYBRIDS = {"qwen3-next": 2, "lfm2": 4, "granite4-hybrid": 4, "falcon-h1": 4, "nemotron-h": 2}


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [("qwen3-5", 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in HYBRIDS.items())],
)
def test_recurrent_layers_are_divided_by_their_heads(checkpoint: Checkpoint, family: str, num_ranks: int) -> None:
    test_every_family_says_what_the_reference_says(checkpoint, family, num_ranks)


def test_heads_that_four_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="linear_num_key_heads=2, which 4 ranks cannot share evenly"):
        engine(save(build("qwen3-5"), tmp_path), 4, "inline")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_ranks"), list(zip(FAMILIES, (2, 4, 2, 4), strict=True)))
def test_and_in_processes_of_their_own(checkpoint: Checkpoint, family: str, num_ranks: int) -> None:
    directory, expected = checkpoint(family)
    with engine(directory, num_ranks, "process") as llm:
        assert generated(llm, GREEDY) == expected
        sampled = generated(llm, SAMPLED)
    with engine(directory, 1, "inline") as llm, clear_of_borders():
        assert sampled == generated(llm, SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "how"), [(2, "divided"), (2, "exchanged"), (4, "exchanged")])
def test_experts_divided_among_processes(checkpoint: Checkpoint, num_ranks: int, how: str) -> None:
    directory, expected = checkpoint("qwen3-moe")
    with engine(directory, num_ranks, "process", experts=how) as llm:
        assert generated(llm, GREEDY) == expected


def test_a_number_of_ranks_that_cannot_share_the_model_is_refused(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("llama")
    with pytest.raises(ConfigError, match="num_attention_heads=4, which 3 ranks"):
        engine(directory, 3, "inline")


def test_ranks_have_their_meeting_place_as_long_as_they_are_a_group_and_leave_none_behind(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory, _ = checkpoint("llama")
    with engine(directory, 2, "inline"):
        (store,) = tmp_path.glob("*/ranks")
        assert store.is_file()
    assert os.listdir(tmp_path) == []
