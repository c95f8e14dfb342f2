"""Whole engines with captured steps, prefill and decode, give the tokens of engines without, whatever is asked."""

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from tests.graphs.engines import install
from tests.models.checkpoints import build, random_tokens, save

PROMPT_LENGTHS = (1, 5, 16, 17, 40)
OUTPUT_LEN = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def engine(checkpoint: Path, mode: str, **graphs) -> LLM:
    return LLM(
        checkpoint,
        progress=False,
        kv={"page_size": 4, "num_pages": 200},
        device={"kind": "cpu"},
        scheduler={"prefill_chunk": 16, "max_step_tokens": 24, "max_running": 6},
        model_={"dtype": "float32", "tokenizer": "none", "max_len": 64},
        graphs={"mode": mode, **graphs},
        plugins={"attention": "torch"},
    )


def prompts():
    return [random_tokens(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]


def outputs(llm, params):
    return [(one.token_ids, one.finish_reason) for one in llm.generate(prompts(), params)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
ASKED = {
    "greedy": [GREEDY] * 5,
    "temperature": [GREEDY.replace(temperature=0.8, seed=seed) for seed in range(4)] + [GREEDY],
    "cuts and penalties": [
        GREEDY.replace(temperature=0.9, top_k=5, seed=1),
        GREEDY.replace(temperature=1.1, top_p=0.6, seed=2),
        GREEDY.replace(temperature=1.0, min_p=0.2, top_k=9, top_p=0.9, repetition_penalty=1.3, seed=3),
        GREEDY.replace(presence_penalty=0.7, frequency_penalty=0.4),
        GREEDY.replace(temperature=0.7, seed=4),
    ],
    "what is sampled behind the graph": [
        GREEDY.replace(logit_bias={7: 5.0}),
        GREEDY.replace(temperature=0.9, logprobs=2, seed=1),
        GREEDY.replace(min_tokens=9, ignore_eos=False),
        GREEDY.replace(repetition_penalty=1.2),
        GREEDY.replace(temperature=1.0, top_p=0.8, seed=3),
    ],
}


@pytest.fixture(scope="module")
def engines(checkpoint):
    """(captured, plain); both have the same attention."""
    with pytest.MonkeyPatch.context() as patch:
        devices = install(patch)
        with engine(checkpoint, "breakable") as captured, engine(checkpoint, "off") as plain:
            yield captured, plain, devices[0]


@pytest.mark.parametrize("asked", ASKED)
def test_tokens_are_those_of_an_engine_without_graphs(engines, asked):
    captured, plain, device = engines
    device.replays.clear()
    assert outputs(captured, ASKED[asked]) == outputs(plain, ASKED[asked])
    assert len(device.replays) > OUTPUT_LEN
