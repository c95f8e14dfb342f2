"""Steps with adapters are replayed, give the tokens of steps without graphs, and wait for nothing."""

import asyncio

import numpy as np
import pytest

from engine.config import Config
from engine.control.system import System
from engine.features.lora.adapters import RankAdapters
from engine.messages import RequestOptions
from engine.types.params import SamplingParams
from tests.features.lora.made import greedy
from tests.features.lora.test_equality import NAMES, PROMPTS, Made, parts_of
from tests.graphs.engines import install

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("qwen"), "qwen3-yarn-bias")


def config(made: Made, mode: str, **graphs: object) -> Config:
    tables: dict[str, dict[str, object]] = {
        "graphs": {"mode": mode, **graphs},
        "plugins": {"attention": "torch"},
        "model": {"dtype": "float32"},
        "device": {"kind": "cpu"},
        "scheduler": {"max_running": 4, "max_step_tokens": 32},
    }
    return made.config(**tables)


async def said(made: Made, config: Config) -> list[list[int]]:
    """The tokens of all prompts at once, each with an adapter of its own."""
    system = System(config)
    await system.start()
    try:
        adapters = made.adapters(system)

        async def one(prompt: list[int], name: str) -> list[int]:
            stream = system.ingress.open(prompt, PARAMS, RequestOptions(parts=parts_of(adapters[name])))
            return np.frombuffer((await stream.collect()).token_ids, np.int32).tolist()

        return await asyncio.gather(*(one(*each) for each in zip(PROMPTS, NAMES, strict=True)))
    finally:
        await system.stop()


def expected(made: Made) -> list[list[int]]:
    pairs = zip(PROMPTS, NAMES, strict=True)
    return [greedy(made.references[name], prompt, PARAMS.max_tokens or 0) for prompt, name in pairs]


async def test_mixed_batches_are_replayed_and_each_row_has_its_adapter(
    qwen: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = install(monkeypatch)
    found = await said(qwen, config(qwen, "decode"))
    device = devices[0]
    assert found == expected(qwen)
    assert len(device.replays) >= 2 * 11, "a body and a sampler for each step, beside those with prompts"
    last = [len(graph.operations) for graph in device.graphs[-10:]]
    assert last[5] > last[0], "the model with adapters is the second of a size"
    assert [last[1 + n] == last[6 + n] for n in range(4)] == [True] * 4


@pytest.mark.parametrize("fault", [False, True])
async def test_prompts_with_adapters_are_replayed(qwen: Made, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """fault: where nothing sends the slots, the tokens are others."""
    install(monkeypatch)
    eager: list[object] = []
    monkeypatch.setattr(RankAdapters, "begin", lambda self, wanted_N: eager.append(wanted_N))
    if fault:
        monkeypatch.setattr(RankAdapters, "send", lambda self: None)
    found = await said(qwen, config(qwen, "breakable", max_tokens=32))
    assert not eager
    assert (found == expected(qwen)) is not fault
