"""Settings change under live streams: no token is lost or repeated, and what cannot be changes nothing."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from benchmarks.null_engine import NullSystem
from engine.actors.stream import Stream
from engine.config import Config, build_config
from engine.control.changeover import Changeover
from engine.control.engine_spec import EngineSpec, engine_spec
from engine.control.system import System
from engine.messages import Finish
from engine.settings.sections import LimitsSection
from engine.types.errors import CallboardError, RequestError, WeightsError
from engine.types.params import SamplingParams
from tests.engine.held_steps import hold_steps
from tests.pace import far

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
NUM_STREAMS = 64
MOST = 48
# Random weights, and no more of them than a step needs to be one.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
Tables = dict[str, dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    plugins = {"attention": "torch", "linear": "torch"}
    return build_config(
        Config(),
        {
            "model": {"path": str(tmp_path), "tokenizer": "none", "load_format": "dummy"},
            "kv": {"num_pages": 512},
            "device": {"kind": "cpu", "threads": 1, "seed": 1},
            "plugins": plugins,
        },
    )


@pytest.fixture(autouse=True)
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set, executors are held before their next step."""
    return hold_steps(monkeypatch)


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[System, Changeover]]:
    system = System(config)
    await system.start()
    try:
        async with asyncio.timeout(far(20)):
            yield system, Changeover(system)
    finally:
        await system.stop()
    assert system.died is None
    assert len(asyncio.all_tasks()) == 1


def open_streams(system: System) -> list[Stream]:
    prompts = [[(7 * number + place) % 500 for place in range(5 + number % 7)] for number in range(NUM_STREAMS)]
    return [system.ingress.open(prompt, GREEDY) for prompt in prompts]


async def read(streams: list[Stream]) -> list[list[int]]:
    deltas = await asyncio.gather(*(stream.collect() for stream in streams))
    assert {delta.finish for delta in deltas} == {Finish.LENGTH}
    return [np.frombuffer(delta.token_ids, dtype=np.int32).tolist() for delta in deltas]


async def some_steps(system: System, count: int = 3) -> None:
    meter = system.monitor.meter
    assert meter is not None
    until = meter.num_steps + count
    async with asyncio.timeout(far(10)):
        while meter.num_steps < until:
            await asyncio.sleep(0.001)


CHANGES: list[Tables] = [
    {"kv": {"num_pages": 300}},
    {"kv": {"page_size": 32, "num_pages": 256}},
    {"plugins": {"linear": "onednn"}},
    {"scheduler": {"max_step_tokens": 1024}},
    {"plugins": {"policy": "lpm"}, "scheduler": {"prefill_chunk": 64}},
    {"plugins": {"eviction": "fifo"}, "scheduler": {"max_running": 32}},
]


async def test_no_token_is_lost_or_repeated_over_six_changes(config: Config, go: threading.Event) -> None:
    expected: list[list[int]] = []
    async with running(config) as (system, _):
        expected.extend(await read(open_streams(system)))
    async with running(config) as (system, changeover):
        streams, wanted = open_streams(system), config
        for tables in CHANGES:
            await some_steps(system)
            wanted = build_config(wanted, tables)
            go.clear()
            outcome = await changeover.apply(wanted)
            go.set()
            assert outcome.applied
            names = {f"{section}.{key}" for section, keys in tables.items() for key in keys}
            assert {change.key for change in outcome.changes} == names
        assert system.ingress.num_open == NUM_STREAMS, "all was over before the last change"
        assert await read(streams) == expected
        planner = system.scheduler.planner
        assert planner is not None
        planner.check()
        assert (
            planner.requests.limits.page_size,
            planner.requests.limits.num_pages,
            planner.requests.limits.max_running,
        ) == (32, 256, 32)


REFUSED: list[tuple[Tables, str]] = [
    ({"model": {"path": "broken"}}, "broken/model.safetensors"),
    ({"plugins": {"attention": "nowhere"}}, "nowhere"),
    ({"plugins": {"linear": "nowhere"}}, "nowhere"),
    ({"kv": {"num_pages": 3}}, "kv.num_pages=3"),
    ({"kv": {"num_pages": 10**9}}, "kv.num_pages"),
    ({"server": {"port": 9}}, r"server.port \(8000, not 9\)"),
    ({"limits": {"max_requests": 9999}}, "limits.max_requests=9999"),
]


async def test_a_change_that_fails_costs_nothing(config: Config, tmp_path: Path, go: threading.Event) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps(MODEL))
    (broken / "model.safetensors").write_bytes(b"no weights")

    async with running(config) as (system, changeover):
        streams = open_streams(system)
        await some_steps(system, 1)
        go.clear()
        config_before, executors = system.config, system.executors.links[0].slot
        for tables, said in REFUSED:
            if "model" in tables:
                tables = {"model": {"path": str(broken), "load_format": "safetensors"}}
            with pytest.raises(CallboardError, match=said):
                await changeover.apply(build_config(config, tables))
            assert (system.config, system.executors.links[0].slot) == (config_before, executors)
        go.set()
        assert len(await read(streams)) == NUM_STREAMS
        assert system.executors.num_restarts == 0


async def test_the_new_model_is_described_before_it_answers_and_beside_the_event_loop(config: Config) -> None:
    """A description of a model may take as long as reading its weights."""
    described: list[tuple[int, int, int, bool]] = []

    async with running(config) as (system, _):

        def describe(new: EngineSpec) -> bytes:
            beside = threading.current_thread() is not threading.main_thread()
            described.append((new.config.kv.num_pages, system.config.kv.num_pages, new.num_parameters, beside))
            if new.config.kv.num_pages == 98:
                raise WeightsError("a shard cannot be read")
            return b"about"

        changeover = Changeover(system, describe)
        with pytest.raises(WeightsError, match="a shard cannot be read"):
            await changeover.apply(build_config(config, {"kv": {"num_pages": 98}}))
        await changeover.apply(build_config(config, {"kv": {"num_pages": 99}}))
        assert described == [(98, 512, 0, True), (99, 512, 0, True)]


async def test_what_would_change_is_told_and_not_done(config: Config) -> None:
    async with running(config) as (system, changeover):
        wanted = build_config(config, {"kv": {"num_pages": 99}, "limits": {"max_requests": 9}})
        outcome = await changeover.apply(wanted, dry_run=True)
        assert [(one.key, one.after, one.changed) for one in outcome.changes] == [
            ("kv.num_pages", 99, "executors"),
            ("limits.max_requests", 9, "live"),
        ]
        assert (outcome.applied, outcome.road) == (False, "beside")
        assert system.config.kv.num_pages == 512
        assert (await changeover.apply(config)).road == "none"


async def test_live_settings_take_effect_at_once(config: Config) -> None:
    tables: Tables = {
        "limits": {
            "max_requests": 9,
            "max_queued_tokens": 1000,
            "max_requests_per_client": 3,
            "requests_per_minute": 4,
            "tokens_per_minute": 5,
            "first_token_timeout_s": 6.0,
            "request_timeout_s": 7.0,
        },
        "scheduler": {"prefill_chunk": 33, "itl_target_ms": 44.0, "overlap_depth": 1},
        "plugins": {"policy": "lpm"},
    }

    async with running(config) as (system, changeover):
        heard: list[LimitsSection] = []
        system.ingress.settings_watchers.append(lambda changed: heard.append(changed.limits))
        slot = system.executors.links[0].slot
        wanted = build_config(config, tables)
        outcome = await changeover.apply(wanted)
        assert {one.changed for one in outcome.changes} == {"live"}
        await asyncio.sleep(0)
        assert heard == [wanted.limits], "the server gets the new limits"
        planner = system.scheduler.planner
        assert planner is not None
        assert (planner.requests.limits.prefill_chunk, planner.requests.limits.itl_target_s) == (33, 0.044)
        first = system.ingress.open([1], GREEDY)
        await first.next()
        streams = [first, system.ingress.open([2] * 100, GREEDY), *(system.ingress.open([3], GREEDY) for _ in range(7))]
        with pytest.raises(RequestError, match="no more than 9"):
            system.ingress.open([1], GREEDY)
        await some_steps(system)
        chunks = [one.num_prefill_tokens for one in planner.meter.recent_steps if one.num_decodes]
        assert 0 < max(chunks) <= 33 + 7
        assert planner.num_in_flight <= 1, "overlap_depth is 1"
        assert planner._policy.looks_at_cache, "lpm reads the cache to rank the queue"
        await asyncio.gather(*(stream.collect() for stream in streams))
        assert system.executors.links[0].slot is slot, "by the same executors"


async def test_where_both_do_not_fit_streams_wait_for_the_new_executors(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.control.changeover.available_bytes", lambda: 0)

    def with_weights(*args: Any, **kwargs: Any) -> EngineSpec:
        return replace(engine_spec(*args, **kwargs), num_parameters=1)  # dummy weights are not counted

    monkeypatch.setattr("engine.control.changeover.engine_spec", with_weights)
    async with running(config) as (system, changeover):
        streams = open_streams(system)
        await some_steps(system, 1)
        with pytest.raises(CallboardError, match=r"kv\.num_pages=3"):
            await changeover.apply(build_config(config, {"kv": {"num_pages": 3}}))
        await some_steps(system, 1)
        assert system.scheduler.planner is not None
        assert system.scheduler.planner.requests.limits.num_pages == 512, "those from before are back"
        outcome = await changeover.apply(build_config(config, {"kv": {"num_pages": 400}}))
        assert outcome.road == "after"
        assert len(await read(streams)) == NUM_STREAMS


@pytest.mark.parametrize("level", [1, 2])
async def test_who_runs_waits_while_the_engine_sleeps_and_goes_on(
    config: Config, level: Literal[1, 2], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[list[int]] = []
    freed: list[int] = []
    monkeypatch.setattr("engine.control.changeover.release_freed", lambda: freed.append(level))
    async with running(config) as (system, _):
        expected.extend(await read(open_streams(system)))
    async with running(config) as (system, changeover):
        streams = open_streams(system)
        for _ in range(2):
            await some_steps(system, 1)
            await changeover.sleep(level)
            await changeover.sleep(level)  # says nothing new
            assert changeover.is_asleep
            meter = system.monitor.meter
            assert meter is not None
            steps = meter.num_steps
            with pytest.raises(RequestError, match="sleeps") as refused:
                system.ingress.open([1], GREEDY)
            assert (refused.value.status, refused.value.code) == (503, "asleep")
            assert refused.value.retry_after_s
            with pytest.raises(CallboardError, match="wake it up first"):
                await changeover.apply(build_config(config, {"kv": {"num_pages": 99}}))
            assert system.executors.links[0].slot.is_ready == (level == 1)
            assert meter.num_steps == steps
            await changeover.wake()
            await changeover.wake()
            assert not changeover.is_asleep
        assert freed == [2, 2] * (level == 2), "what the C library keeps of the weights goes back to the system"
        assert await read(streams) == expected
        assert len((await system.ingress.open([1], GREEDY).collect()).token_ids) == 4 * MOST


async def test_a_sleeping_engine_stops(config: Config) -> None:
    async with running(config) as (_, changeover):
        await changeover.sleep(2)


async def test_an_engine_on_a_device_of_its_own_stays_there() -> None:
    """The class of a system determines the place of its executors, also after a changeover."""
    demo = {"model": {"path": str(DEMO)}, "kv": {"num_pages": 64}, "device": {"kind": "cpu", "threads": 1}}
    system = NullSystem(build_config(Config(), demo))
    await system.start()
    try:
        async with asyncio.timeout(far(30)):
            before = await read([system.ingress.open([1, 2, 3], GREEDY)])
            outcome = await Changeover(system).apply(build_config(system.config, {"kv": {"num_pages": 96}}))
            assert outcome.applied
            assert outcome.road != "live"
            assert await read([system.ingress.open([1, 2, 3], GREEDY)]) == before == [[before[0][0]] * MOST]
    finally:
        await system.stop()
