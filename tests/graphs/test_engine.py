"""Whole engines with captured steps, prefill and decode, give the tokens of engines without, whatever is asked."""

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import pytest
import torch

from callboard import LLM, SamplingParams
from engine.actors.step_splitting import StepSplitter
from engine.graphs.piecewise import Piecewise
from engine.sampling.sampler import Sampler
from tests.graphs.engines import install
from tests.models import pooled
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
        config={
            "kv": {"page_size": 4, "num_pages": 200},
            "device": {"kind": "cpu"},
            "scheduler": {"prefill_chunk": 16, "max_step_tokens": 24, "max_running": 6},
            "model": {"dtype": "float32", "tokenizer": "none", "max_model_len": 64},
            "graphs": {"mode": mode, **graphs},
            "plugins": {"attention": "torch"},
        },
    )


def prompts(first=0):
    return [random_tokens(length, seed) for seed, length in enumerate(PROMPT_LENGTHS, first)]


def outputs(llm, params, first=0):
    """first: seed of the first prompt; the cache knows those of other tests."""
    return [(one.token_ids, one.finish_reason) for one in llm.generate(prompts(first), params)]


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


@dataclass
class Room:
    """How much there is.  num_tokens: of a step with prefill.  num_rows: that are sampled behind a graph.
    failures: the sizes of what had none."""

    num_tokens: float = inf
    num_rows: float = inf
    failures: list[int] = field(default_factory=list)

    def limit(self, what, function, size):
        """``function`` does its work, and then there is no room for something else."""

        def limited(*args):
            result = function(*args)
            if size(*args) > getattr(self, what):
                self.failures.append(size(*args))
                raise torch.OutOfMemoryError("planted")
            return result

        return limited


@pytest.fixture(scope="module")
def engine_room():
    return Room()


@pytest.fixture
def room(engine_room):
    yield engine_room
    vars(engine_room).update(vars(Room()))


@pytest.fixture(scope="module")
def engines(checkpoint, engine_room):
    """(captured, plain); both have the same attention."""
    with pytest.MonkeyPatch.context() as patch:
        devices = install(patch)
        for owner, name, what, size in (
            (Piecewise, "forward", "num_tokens", lambda self, step: len(step.token_ids_T)),
            (Sampler, "_pick_all", "num_rows", lambda self, batch, logits_NV, positions_N: len(logits_NV)),
        ):
            patch.setattr(owner, name, engine_room.limit(what, getattr(owner, name), size))
        # What has not fitted is tried again here: so every step fails that can.
        patch.setattr(StepSplitter, "_note", lambda self, num_tokens, error: None)
        with engine(checkpoint, "breakable") as captured, engine(checkpoint, "off") as plain:
            yield captured, plain, devices[0]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_tokens_are_those_of_an_engine_without_graphs(engines, asked):
    captured, plain, device = engines
    device.replays.clear()
    assert outputs(captured, ASKED[asked]) == outputs(plain, ASKED[asked])
    assert len(device.replays) > OUTPUT_LEN


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(18, inf), (7, 4), (2, 1)])
def test_a_step_without_room_goes_on_from_where_it_began(engines, room, asked, num_tokens, num_rows):
    """Its halves are decode steps as well, by graphs that read on the device how long rows are."""
    captured, plain, device = engines
    first = 1000 * num_tokens + 10 * list(ASKED).index(asked)
    expected = outputs(plain, ASKED[asked], first)
    device.replays.clear()
    room.num_tokens, room.num_rows = num_tokens, num_rows
    assert outputs(captured, ASKED[asked], first) == expected
    assert room.failures
    assert device.replays


def test_prompts_are_pooled_and_scored_by_graphs(engines):
    captured, plain, device = engines
    device.replays.clear()
    for one, other in zip(captured.embed(prompts(500)), plain.embed(prompts(500)), strict=True):
        assert one.data == pytest.approx(other.data, abs=1e-5)
    assert len(device.replays) >= len(PROMPT_LENGTHS)


def test_a_model_that_generates_nothing_has_no_decode_graphs(tmp_path, monkeypatch):
    devices = install(monkeypatch)
    pooled.build("Qwen3", "ForSequenceClassification", num_labels=2).save_pretrained(tmp_path)
    with engine(tmp_path, "breakable") as captured:
        captures = len(devices[0].replays)
        first = captured.classify(prompts())
        assert len(devices[0].replays) > captures
    with engine(tmp_path, "off") as plain:
        for one, other in zip(first, plain.classify(prompts()), strict=True):
            assert one.data == pytest.approx(other.data, abs=1e-5)
