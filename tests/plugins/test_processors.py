"""Logits processors of plugins, from the request to the token."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.llm import LLM
from engine.plugins.logits_processor.thinking_budget import ThinkingBudget
from engine.text.processors import LogitsRows, Processors
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from tests.models.checkpoints import build, random_tokens, save
from tests.plugins.conftest import Install

BUDGETS = ((0, 2_000_000_000), (0, 2), (5, 2))  # and the token that closes thoughts
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((9, 30, 17))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


ODD = """
from callboard.plugins import LogitsProcessor, Options, hookimpl

CALLBOARD_PLUGIN = {"api": 1}


class OddParams(Options, frozen=True):
    raises: bool = True


class Odd:
    params = OddParams

    def process(self, logits_nV, rows):
        if rows.params[0].raises:
            raise ValueError("planted")
        return logits_nV[:, 1:]


@hookimpl
def callboard_logits_processor(context):
    return Odd()
"""


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
    assert output.logprobs[0].top == plain.logprobs[0].top, "of the model, as with penalties"
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
        ({1: {}}, "must be a mapping of plugins' names"),
    ],
)
def test_what_it_does_not_take_is_the_clients_mistake(llm: LLM, wanted: object, said: str) -> None:
    with pytest.raises(RequestError, match=said) as found:
        llm.generate([PROMPTS[0]], GREEDY.replace(logits_processors=wanted))
    assert (found.value.status, found.value.param) == (400, "logits_processors")


def test_parameters_that_leave_no_token_are_the_clients_mistake(llm: LLM) -> None:
    for changes in ({}, {"temperature": 1.0}, {"logit_bias": {5: 2.0}, "logprobs": 1}):
        params = without_repeats(1, allowed_token_ids=(5,), **changes)
        with pytest.raises(RequestError, match="allow no token") as found:
            llm.generate([PROMPTS[0]], params)
        assert (found.value.status, found.value.code) == (400, "no_token_left")


def test_without_plugins_it_says_that_there_are_none(checkpoint: Path) -> None:
    with LLM(progress=False, config=config(checkpoint, logits_processors=[])) as llm:
        assert llm._system.engine.plugins.several["logits_processor"] == []
        with pytest.raises(RequestError, match=r"plugins\.logits_processors names: none"):
            llm.generate([PROMPTS[0]], without_repeats(2))


def test_one_that_fails_ends_the_requests_that_asked_for_it_alone(
    checkpoint: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme", {"logits_processor.odd": "odd"}, {"odd.py": ODD})
    with LLM(progress=False, config=config(checkpoint, logits_processors=["odd", "no_repeat_ngram"])) as llm:
        expected = outputs(llm, [GREEDY, without_repeats(2), GREEDY])
        wanted = [GREEDY, without_repeats(2)]

        async def together(odd: SamplingParams) -> list[object]:
            streams = [llm._system.ingress.open(*pair) for pair in zip(PROMPTS, [*wanted, odd], strict=True)]
            return await asyncio.gather(*(one.collect() for one in streams), return_exceptions=True)

        for said, table in (("ValueError: planted", {}), ("it returned torch.float32", {"raises": False})):
            work = together(GREEDY.replace(logits_processors={"odd": table}))
            first, second, failed = asyncio.run_coroutine_threadsafe(work, llm._loop).result(timeout=60)
            assert [np.frombuffer(one.token_ids, dtype=np.int32).tolist() for one in (first, second)] == expected[:2]
            assert isinstance(failed, RequestError)
            assert failed.code == "nonfinite_logits"
            assert "plugin logits_processor.odd failed; the requests that use it end" in caplog.text
            assert said in caplog.text


def test_a_token_beyond_the_vocabulary_is_refused_and_rules_out_its_own_row_alone() -> None:
    budget = ThinkingBudget(8)
    for name in ("opens", "closes"):
        table = {"tokens": 0, "opens": 1, "closes": 2} | {name: 8}
        with pytest.raises(RequestError, match=f"thinking_budget: Expected `int` <= 7 - at `[$].{name}`"):
            Processors({"thinking_budget": budget}).read({"thinking_budget": json.dumps(table)})
    logits_nV = torch.randn(3, 8)
    lengths = torch.tensor([3, 3, 3])
    params = tuple(budget.params(tokens=tokens, opens=1, closes=closes) for tokens, closes in BUDGETS)
    rows = LogitsRows(
        params=params,
        token_ids_nL=torch.tensor([[5, 1, 6]] * 3, dtype=torch.int32),
        lengths_n=lengths,
        num_prompt_n=lengths - 1,
        host_lengths_n=lengths.numpy(),
        upload=torch.from_numpy,
    )
    seen_nV = budget.process(logits_nV.clone(), rows)
    assert seen_nV[1].isfinite().nonzero().tolist() == [[2]], "it closes its thoughts"
    assert not seen_nV[0].isfinite().any()
    assert torch.equal(seen_nV[2], logits_nV[2])


@pytest.mark.slow
def test_workers_in_processes_have_them_too(checkpoint: Path, llm: LLM) -> None:
    wanted = [without_repeats(2)] * 3
    apart = config(checkpoint) | {"placement": {"executor": "process", "tokenizers": 1}}
    with LLM(progress=False, config=apart) as processes:
        assert outputs(processes, wanted) == outputs(llm, wanted)
        with pytest.raises(RequestError, match="it takes: size"):
            processes.generate([PROMPTS[0]], GREEDY.replace(logits_processors={"no_repeat_ngram": {}}))
