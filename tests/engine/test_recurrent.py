"""Models with recurrent layers through the whole engine: nothing about the batch changes what they generate."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.execution.launched_step import LaunchedStep
from engine.execution.runner import ModelRunner
from engine.messages import Step
from engine.types.errors import ConfigError
from server.extensions.verify.verify import WAYS as VERIFIED
from server.extensions.verify.verify import verify_numerics
from tests.engine.test_changeover import running, some_steps
from tests.models.checkpoints import VARIANTS, build, random_tokens, reference_logits, save

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
KINDS = ("lfm2", "qwen3-5", "granite4-hybrid-experts", "falcon-h1", "nemotron-h")  # one of each kind of recurrent layer
LATER = ("kimi-linear", "minimax", "olmo-hybrid")
LENGTHS = (1, 2, 15, 16, 17, 40, 75, 90)
OUTPUT_LEN = 64
STEP_S = 0.01  # so that a fast machine has not done all steps before a change
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)


@pytest.fixture(scope="module", params=[*KINDS, *(pytest.param(one, marks=pytest.mark.slow) for one in LATER)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = build(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    """The tokens of ``generate`` of transformers for each prompt alone: each is the likeliest one behind those before
    it.  One forward pass says so of a whole output; ``generate`` takes one for each token."""
    directory, model = checkpoint
    with served(directory, kv={"num_pages": 256}) as llm:
        outputs = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    for prompt, output in zip(prompts(), outputs, strict=True):
        logits_TV = reference_logits(model, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        assert logits_TV.argmax(-1).tolist() == output, "not what transformers generates"
    return outputs


def prompts() -> list[list[int]]:
    return [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def generated(model: Any, prompt: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=OUTPUT_LEN,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def served(directory: Path, **tables: Any) -> LLM:
    return LLM(directory, progress=False, config={"model": {"dtype": "float32", "tokenizer": "none"}} | tables)


@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 64))])
def test_tokens_are_those_of_generate_in_chunks_of_any_size(
    chunk: int, checkpoint: tuple[Path, Any], expected: list[list[int]]
) -> None:
    scheduler = {"prefill_chunk": chunk, "max_step_tokens": max(64, chunk), "max_running": 5}
    with served(checkpoint[0], kv={"num_pages": 256}, scheduler=scheduler) as llm:
        assert [one.token_ids for one in llm.generate(prompts(), GREEDY)] == expected
        assert [one.token_ids for one in llm.generate(prompts(), GREEDY)] == expected, "the second time"


def test_tokens_are_those_of_generate_through_retraction(
    checkpoint: tuple[Path, Any], expected: list[list[int]]
) -> None:
    for _ in range(20):  # which rows run together depends on when they arrive
        with served(checkpoint[0], kv={"num_pages": 22}, scheduler={"max_step_tokens": 64}) as llm:
            planner = llm._system.scheduler._planned
            short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            llm.generate([[3]] * 40, short)  # outputs look short, so many are let in
            assert [one.token_ids for one in llm.generate(prompts(), GREEDY)] == expected
        if planner.meter.num_retractions:
            break
    assert planner.meter.num_retractions


def test_several_outputs_of_one_prompt_have_states_of_their_own(
    checkpoint: tuple[Path, Any], expected: list[list[int]]
) -> None:
    with served(checkpoint[0], kv={"num_pages": 256}) as llm:
        several = llm.generate([prompts()[-1]] * 3, GREEDY)
        assert [one.token_ids for one in several] == [expected[-1]] * 3


async def test_streams_go_on_with_their_states_through_sleep_and_a_change_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ModelRunner.launch

    def no_faster(self: ModelRunner, step: Step) -> LaunchedStep:
        time.sleep(STEP_S)
        return launch(self, step)

    monkeypatch.setattr(ModelRunner, "launch", no_faster)
    model = build("qwen3-5")
    tables = {"model": {"path": str(save(model, tmp_path)), "tokenizer": "none"}, "device": {"kind": "cpu"}}
    # One after another, so that they last: a busy machine sees few of their steps.
    config = build_config(Config(), {**tables, "kv": {"num_pages": 64}, "scheduler": {"max_running": 1}})
    async with running(config) as (system, changeover):
        streams = [system.ingress.open(prompt, GREEDY) for prompt in prompts()[:4]]
        for level in (1, 2):
            await some_steps(system)
            await changeover.sleep(level)
            await changeover.wake()
        await some_steps(system)
        assert (await changeover.apply(build_config(config, {"kv": {"num_pages": 48, "page_size": 8}}))).applied
        assert system.ingress.num_open, "all was over before the change"
        found = [list(np.frombuffer((await one.collect()).token_ids, dtype=np.int32)) for one in streams]
    assert found == [generated(model, prompt) for prompt in prompts()[:4]]


def test_layers_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    save(build("kimi-linear"), tmp_path)
    config = {"model": {"tokenizer": "none"}, "device": {"tensor_parallel": 3}}
    with pytest.raises(ConfigError, match="which 3 ranks cannot share evenly"):
        LLM(tmp_path, progress=False, config=config)


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "two at a time": {"scheduler": {"max_running": 2}},
    "in chunks of 7": {"scheduler": {"prefill_chunk": 7, "max_step_tokens": 16}},
    "in chunks of 1": {"scheduler": {"prefill_chunk": 1}},
    "with few pages": {"kv": {"num_pages": 12}},
}


@pytest.mark.parametrize("variant", ["lfm2", "qwen3-5", "granite4-hybrid", "falcon-h1", "nemotron-h", "olmo-hybrid"])
def test_with_invariant_numerics_outputs_have_the_same_bits_in_every_way(variant: str, tmp_path: Path) -> None:
    save(build(variant), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    found = {}
    for way, tables in WAYS.items():
        config = {"model": {"dtype": "float32", "tokenizer": "none", "numerics": "invariant"}, "device": {"threads": 1}}
        with LLM(tmp_path, progress=False, config=config | {"kv": {"num_pages": 64}} | tables) as llm:
            for name in (way, f"{way}, cached"):
                found[name] = [(one.token_ids, one.logprobs) for one in llm.generate(prompts(), params)]
    assert [way for way, outputs in found.items() if outputs != found["together"]] == []


@pytest.mark.slow
def test_the_same_bits_through_retractions_and_from_a_process_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = VARIANTS["qwen3-5"]
    vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    monkeypatch.setitem(VARIANTS, "qwen3-5", (family, changes | {"vocab_size": vocab_size}))
    save(build("qwen3-5"), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, tmp_path)
    config = build_config(
        Config(),
        {
            "model": {"path": str(tmp_path)},
            "device": {"threads": 1},
            "scheduler": {"max_step_tokens": 256, "prefill_chunk": 256},
            "kv": {"num_pages": 512},
        },
    )
    by_name = {way.name: way for way in VERIFIED}
    killed = replace(by_name["in a process, killed and recomputed"], kills=1)
    names = ("alone", "together", "in chunks of 32", "with few pages")
    verify_numerics(config, [*(by_name[name] for name in names), killed], number=4)
