"""The system as a whole: it starts, says why when it cannot, survives a crash of nobody and hides none."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Config, build_config
from engine.control.system import System
from engine.messages import Finish, Step
from engine.types.errors import ConfigError, EngineDied, PluginError, RequestError, WeightsError
from engine.types.params import SamplingParams
from tests.models.checkpoints import build, random_tokens, save
from tests.pace import far

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


Configured = Callable[..., Config]


PLACEMENTS = {
    "inline": {"executor": "inline"},
    "process": {"executor": "process"},
    "pool": {"executor": "inline", "tokenizers": 2},
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "process")) for name in PLACEMENTS])
def configured(request: pytest.FixtureRequest) -> Configured:
    """The same tests for all placements."""

    def configured(checkpoint: Path, **sections: dict[str, Any]) -> Config:
        placement = {**PLACEMENTS[request.param], **sections.pop("placement", {})}
        tables = {"model": {"path": str(checkpoint), "tokenizer": "none"}, "kv": {"num_pages": 64}, **sections}
        return build_config(Config(), {**tables, "placement": placement})

    return configured


async def test_a_request_runs_and_leaves_nothing_behind(configured: Configured, checkpoint: Path) -> None:
    system = System(configured(checkpoint))
    await system.start()
    delta = await system.ingress.open(random_tokens(20, 0), GREEDY).collect()
    assert (delta.finish, len(delta.token_ids)) == (Finish.LENGTH, 8 * 4)
    await system.stop(drain_timeout_s=1)
    assert system.ingress.stats is not None
    assert system.ingress.stats.pages_used == 0
    assert system.died is None
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_request_gives_its_pages_back_within_a_second(
    configured: Configured, checkpoint: Path
) -> None:
    system = System(configured(checkpoint))
    await system.start()
    stream = system.ingress.open(random_tokens(20, 0), GREEDY.replace(max_tokens=400))
    await stream.next()
    assert system.ingress.stats is not None
    assert system.ingress.stats.pages_used > 0
    stream.close()
    async with asyncio.timeout(far(1)):
        while system.ingress.stats.pages_used:
            await asyncio.sleep(0.005)
    await system.stop()


async def test_draining_lets_open_requests_finish_and_refuses_new_ones(
    configured: Configured, checkpoint: Path
) -> None:
    system = System(configured(checkpoint))
    await system.start()
    stream = system.ingress.open(random_tokens(20, 0), GREEDY)
    stopping = asyncio.create_task(system.stop(drain_timeout_s=10))
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as refused:
        system.ingress.open([1], GREEDY)
    assert refused.value.status == 503
    assert (await stream.collect()).finish == Finish.LENGTH
    await stopping


async def test_what_is_still_open_when_the_drain_ends_gets_an_error(configured: Configured, checkpoint: Path) -> None:
    system = System(configured(checkpoint))
    await system.start()
    stream = system.ingress.open(random_tokens(20, 0), GREEDY.replace(max_tokens=400))
    await system.stop(drain_timeout_s=0)
    with pytest.raises(RequestError, match="shutting down"):
        await stream.collect()
    assert system.ingress.stats is not None
    assert system.ingress.stats.pages_used == 0


@pytest.mark.parametrize("actor", ["tokenizer", "scheduler", "executor0", "ingress"])
async def test_a_crash_of_any_actor_ends_every_request_and_names_it(
    configured: Configured, checkpoint: Path, actor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(configured(checkpoint, placement={"max_restarts": 0}))
    await system.start()
    streams = [system.ingress.open(random_tokens(20, seed), GREEDY.replace(max_tokens=400)) for seed in range(3)]
    await streams[0].next()
    if actor == "executor0":
        system.executors.links[0].put(Step(step_id=7, decode_rows=b"abc"))  # three bytes are no int32 column
    else:
        (victim,) = [one for one in system.actors if one.name in (actor, f"{actor}s")]

        def broken(_: object) -> None:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(victim, "handle", broken)
    async with asyncio.timeout(far(10)):
        for stream in streams:
            with pytest.raises(EngineDied, match=f"{actor}s? crashed"):
                while True:
                    await stream.next()
        with pytest.raises(EngineDied, match=f"{actor}s? crashed"):
            await system.wait()
        with pytest.raises(RequestError) as refused:
            system.ingress.open([1], GREEDY)
    assert (refused.value.status, refused.value.code) == (503, "engine_died")
    await system.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_weights_that_cannot_be_loaded_are_the_starts_own_error(
    configured: Configured, checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    system = System(configured(tmp_path))
    with pytest.raises(WeightsError, match=r"model\.safetensors.*contains NaN"):
        await system.start()
    await system.stop()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("sections", "error", "said"),
    [
        ({"model": {"path": "/nowhere/at/all"}}, WeightsError, "/nowhere/at/all"),
        ({"cut": -100}, WeightsError, r"model\.safetensors: tensor '.*' ends at byte"),
        ({"plugins": {"attention": "nonsense"}}, PluginError, "available: .*torch"),
        ({"model_len": 513}, ConfigError, "513"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(
    configured: Configured,
    checkpoint: Path,
    tmp_path: Path,
    sections: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    if "cut" in sections:
        shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
        weights = (checkpoint / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(weights[: sections["cut"]])
        checkpoint, sections = tmp_path, {}
    if "model_len" in sections:
        sections = {"model": {"path": str(checkpoint), "tokenizer": "none", "max_model_len": sections["model_len"]}}
    with pytest.raises(error, match=said):
        System(configured(checkpoint, **sections))


def test_a_pool_below_the_longest_request_is_a_warning_with_the_number_that_is_not(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def system(**kv: int) -> System:
        model = {"path": str(checkpoint), "tokenizer": "none"}
        return System(build_config(Config(), {"model": model, "kv": kv}))

    longest = system().max_len
    assert longest % 16 == 0
    enough = longest // 16
    system(num_pages=enough)
    assert "kv.num_pages" not in caplog.text
    system(num_pages=2)
    assert "kv.num_pages=2: the pool holds 32 tokens" in caplog.text
    assert f"raise it to {enough}," in caplog.text


def test_an_unknown_quantization_is_answered_with_those_that_this_machine_has(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.host.device_defaults.torch_may_use_gpus", lambda: False)
    model = {"path": str(checkpoint), "tokenizer": "none", "quantization": "q4"}
    with pytest.raises(PluginError, match="supported here: 'bfloat16', 'float16', 'int8', 'none', or"):
        System(build_config(Config(), {"model": model}))
