"""Decode steps with adapters are replayed, give the tokens of steps without graphs, and wait for nothing."""

import asyncio

import numpy as np
import pytest

from engine.control.system import System
from engine.messages import RequestOptions
from engine.types.params import SamplingParams
from tests.features.lora.made import greedy
from tests.features.lora.test_equality import NAMES, PROMPTS, Made, parts_of
from tests.graphs.engines import install

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("qwen"), "qwen3-yarn-bias")


async def test_mixed_batches_are_replayed_and_each_row_has_its_adapter(
    qwen: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = install(monkeypatch)
    tables: dict[str, dict[str, object]] = {
        "graphs": {"mode": "decode"},
        "plugins": {"attention": "torch"},
        "model": {"dtype": "float32"},
        "device": {"kind": "cpu"},
        "scheduler": {"max_running": 4},
    }
    system = System(qwen.config(**tables))
    await system.start()
    try:
        adapters, device = qwen.adapters(system), devices[0]
        device.replays.clear()

        async def one(prompt: list[int], name: str) -> list[int]:
            stream = system.ingress.open(prompt, PARAMS, RequestOptions(parts=parts_of(adapters[name])))
            return np.frombuffer((await stream.collect()).token_ids, np.int32).tolist()

        asked = [*zip(PROMPTS, NAMES, strict=True)]
        found = await asyncio.gather(*(one(*each) for each in asked))
    finally:
        await system.stop()
    assert found == [greedy(qwen.references[name], prompt, PARAMS.max_tokens or 0) for prompt, name in asked]
    assert len(device.replays) >= 2 * 11, "a body and a sampler for each step, beside those with prompts"
    last = [len(graph.operations) for graph in device.graphs[-10:]]
    assert last[5] > last[0], "the model with adapters is the second of a size"
    assert [last[1 + n] == last[6 + n] for n in range(4)] == [True] * 4
