"""Logits processors of plugins, from the request to the token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.errors import RequestError
from engine.llm import LLM
from engine.params import SamplingParams
from tests.models.checkpoints import build, random_tokens, save
from tests.plugins.conftest import Install  # noqa: F401

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((9, 30, 17))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


def config(checkpoint: Path, **plugins: object) -> dict[str, object]:
    return {
        "model": {"path": str(checkpoint), "tokenizer": "none", "dtype": "float32"},
        "kv": {"num_pages": 40, "page_size": 4},
        "plugins": {"logits_processors": ["no_repeat_ngram"], **plugins},
    }


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(progress=False, config=config(checkpoint)) as llm:
        yield llm


def without_repeats(size: int, **changes: object) -> SamplingParams:
    return GREEDY.replace(logits_processors={"no_repeat_ngram": {"size": size}}, **changes)


def outputs(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(PROMPTS, params)]


def test_the_built_in_one_equals_transformers_also_where_rows_come_back(checkpoint: Path, llm: LLM) -> None:
    model = build("qwen3-tied").eval()
    expected = []
    for prompt, size in zip(PROMPTS, (1, 2, 3), strict=True):
        ids = torch.tensor([prompt])
        kept = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
        expected.append(model.generate(ids, no_repeat_ngram_size=size, **kept)[0, len(prompt) :].tolist())
    wanted = [without_repeats(size) for size in (1, 2, 3)]
    plain = outputs(llm, [GREEDY] * 3)
    assert outputs(llm, wanted) == expected
    assert outputs(llm, wanted) != plain
    assert outputs(llm, [GREEDY, wanted[1], GREEDY]) == [plain[0], expected[1], plain[2]], "others do not notice"
    # 56 tokens of prompts and 72 of output need 34 pages.
    crowded = config(checkpoint) | {"kv": {"num_pages": 20, "page_size": 4}}
    with LLM(progress=False, config=crowded) as small:
        assert outputs(small, wanted) == expected


def test_it_works_beside_penalties_bias_logprobs_and_choices(llm: LLM) -> None:
    params = without_repeats(1, presence_penalty=1.5, logit_bias={7: 3.0}, logprobs=2, max_tokens=12)
    output = llm.generate([PROMPTS[0]], params)[0]
    assert len({*output.token_ids, *PROMPTS[0]}) == 12 + len({*PROMPTS[0]})
    plain = llm.generate([PROMPTS[0]], GREEDY.replace(logprobs=2, max_tokens=1))[0]
    assert output.logprobs[0].top_ids == plain.logprobs[0].top_ids if hasattr(plain.logprobs[0], "top_ids") else True
    seeded = [without_repeats(1, temperature=1.0, seed=seed, max_tokens=12) for seed in (1, 2, 3)]
    drawn = outputs(llm, seeded)
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        assert len({*tokens}) == 12
        assert not {*tokens} & {*prompt}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            {"no_repeat": {}},
            "logits_processors: there is no 'no_repeat' here; plugins.logits_processors names: no_repeat_ngram",
        ),
        ({"no_repeat_ngram": {}}, "no_repeat_ngram: Object missing required field `size`; it takes: size"),
        ({"no_repeat_ngram": {"size": 0}}, "no_repeat_ngram: Expected `int` >= 1"),
        ({"no_repeat_ngram": {"size": 2, "sice": 3}}, "unknown field `sice`"),
        ({"no_repeat_ngram": 3}, "must be a mapping of plugins' names"),
        ([1], "must be a mapping of plugins' names"),
    ],
)
def test_what_it_does_not_take_is_the_clients_mistake(llm: LLM, wanted: object, said: str) -> None:
    with pytest.raises(RequestError, match=said) as found:
        llm.generate([PROMPTS[0]], GREEDY.replace(logits_processors=wanted))
    assert (found.value.status, found.value.param) == (400, "logits_processors")


def test_without_plugins_it_says_that_there_are_none(checkpoint: Path) -> None:
    with LLM(progress=False, config=config(checkpoint, logits_processors=[])) as llm:
        assert llm._system._plugins.logits_processors == []
        with pytest.raises(RequestError, match=r"plugins\.logits_processors names: none"):
            llm.generate([PROMPTS[0]], without_repeats(2))
