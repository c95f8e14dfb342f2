"""Executors that die, hang or fail in the middle of many streams: all go on, and no token is lost or comes twice."""

import asyncio
import logging
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.actors.stream import Stream
from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.compiled_decodes import CompiledDecodes
from engine.messages import Delta, Finish, Step
from engine.models.decoder import Decoder
from engine.types.errors import EngineDied, RequestError
from engine.types.params import SamplingParams
from tests.models.checkpoints import build, random_tokens, save
from tests.pace import far
from tests.sampling.borders import clear_of_borders
from tests.workers.executors import alive, children, send
from tests.workers.quick_server import QuickSystem

pytestmark = pytest.mark.slow

NUM_STREAMS = 32
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, max_tokens=150, ignore_eos=True, seed=3),
    SamplingParams(temperature=0.8, max_tokens=90, ignore_eos=True, seed=4, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True, frequency_penalty=0.5),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


def configured(checkpoint: Path, executor: str = "process", **placement: Any) -> Config:
    sections = {
        "model": {"path": str(checkpoint), "tokenizer": "none"},
        "kv": {"num_pages": 320},
        "placement": {"executor": executor, "max_restarts": 100, **placement},
    }
    return build_config(Config(), sections)


def open_all(system: System) -> list[Stream]:
    """Prompts of many lengths; every other one begins as the one before it does."""
    return [
        system.ingress.open(
            [*random_tokens(20, index // 2), *random_tokens(5 + index, 100 + index)], PARAMS[index % len(PARAMS)]
        )
        for index in range(NUM_STREAMS)
    ]


async def read_all(streams: list[Stream]) -> list[Delta]:
    return list(await asyncio.gather(*(stream.collect() for stream in streams)))


def outputs(deltas: list[Delta]) -> list[tuple[bytes, Finish]]:
    return [(delta.token_ids, delta.finish) for delta in deltas]


def alone(system: System) -> list[tuple[bytes, Finish]]:
    """What the streams of a system are when nothing happens."""

    async def scenario() -> list[tuple[bytes, Finish]]:
        await system.start()
        try:
            return outputs(await read_all(open_all(system)))
        finally:
            await system.stop()

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> list[tuple[bytes, Finish]]:
    """From an executor in this process."""
    with clear_of_borders():
        return alone(System(configured(checkpoint, "inline")))


@pytest.fixture(scope="module")
def quick_ones(checkpoint: Path) -> list[tuple[bytes, Finish]]:
    """From executors without torch, for what does not depend on the model."""
    return alone(QuickSystem(configured(checkpoint, "inline")))


@asynccontextmanager
async def running(config: Config, kind: type[System] = System) -> AsyncIterator[System]:
    """A system, of which nothing is left at its end."""
    system = kind(config)
    await system.start()
    try:
        async with asyncio.timeout(far(60)):
            yield system
    finally:
        await system.stop()
    assert len(asyncio.all_tasks()) == 1
    assert not children()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_thirty_two_streams_outlive_their_executor(
    checkpoint: Path, undisturbed: list[tuple[bytes, Finish]], number: signal.Signals
) -> None:
    rng = random.Random(7)

    async with running(configured(checkpoint, silence_timeout_s=1.0)) as system:
        for _ in range(2):
            streams = open_all(system)
            first = await streams[0].next()
            await asyncio.sleep(rng.random() * 0.15)
            restarts = system.executors.num_restarts
            victim = send(number)
            await until(lambda: system.executors.num_restarts > restarts)  # noqa: B023
            assert system.ingress.recovering
            late = system.ingress.open(random_tokens(9, 1), PARAMS[0])
            rest, *others = await read_all(streams)
            whole = [(first.token_ids + rest.token_ids, rest.finish), *outputs(others)]
            assert whole == undisturbed
            assert (await late.collect()).finish == Finish.LENGTH
            assert not system.ingress.recovering
            assert not alive(victim)
        assert system.ingress.stats is not None
        await until(lambda: system.ingress.stats.pages_used == 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("executor", "num_times", "kind"),
    [("inline", 2, System), ("process", 1, QuickSystem)],
    ids=["inline-2", "process-1"],
)
async def test_a_request_that_ends_every_executor_ends_alone(
    checkpoint: Path,
    undisturbed: list[tuple[bytes, Finish]],
    quick_ones: list[tuple[bytes, Finish]],
    executor: str,
    num_times: int,
    kind: type[System],
) -> None:
    """Twice: more losses than there may be restarts."""
    whole = undisturbed if kind is System else quick_ones
    async with running(configured(checkpoint, executor, max_restarts=3), kind) as system:
        # What is let in here is refused everywhere else: a token that the model does not have.
        system.ingress._vocab_size = poison = 1 << 20
        for _ in range(num_times):
            streams = open_all(system)
            await streams[0]._arrived.wait()
            bad = system.ingress.open([5, poison - 1, 7], PARAMS[0])
            with pytest.raises(RequestError, match="ended the model's executors 3 times in a row") as failed:
                await bad.collect()
            assert (failed.value.status, failed.value.code) == (500, "executors_lost")
            assert outputs(await read_all(streams)) == whole
        assert system.executors.num_restarts == 3 * num_times
        assert system.died is None


async def test_two_kills_in_a_row_one_while_the_new_one_loads(
    checkpoint: Path, quick_ones: list[tuple[bytes, Finish]]
) -> None:
    async with running(configured(checkpoint), QuickSystem) as system:
        streams = open_all(system)
        await streams[-1]._arrived.wait()
        before = send(signal.SIGKILL)
        await until(lambda: children() not in ([], [before]))
        send(signal.SIGKILL)
        assert outputs(await read_all(streams)) == quick_ones
        assert system.executors.num_restarts == 2


async def test_requests_may_be_cancelled_while_executors_come_back(checkpoint: Path) -> None:
    async with running(configured(checkpoint), QuickSystem) as system:
        streams = open_all(system)
        await streams[0].next()
        send(signal.SIGKILL)
        await until(lambda: system.ingress.recovering)
        for stream in streams[1:]:
            stream.close()
        last = await streams[0].collect()
        assert last.finish == Finish.LENGTH
        assert system.ingress.num_open == 0


async def test_stopping_while_executors_come_back_ends_what_is_open(checkpoint: Path) -> None:
    async with running(configured(checkpoint), QuickSystem) as system:
        streams = open_all(system)
        await streams[0].next()
        send(signal.SIGKILL)
        await until(lambda: system.ingress.recovering)
        await system.stop()
        for stream in streams:
            with pytest.raises(RequestError, match="shutting down"):
                await stream.collect()


async def test_draining_waits_for_the_executors_to_come_back(
    checkpoint: Path, quick_ones: list[tuple[bytes, Finish]]
) -> None:
    async with running(configured(checkpoint), QuickSystem) as system:
        streams = open_all(system)
        await asyncio.sleep(0.05)
        send(signal.SIGKILL)
        stopping = asyncio.ensure_future(system.stop(drain_timeout_s=far(30)))
        assert outputs(await read_all(streams)) == quick_ones
        await stopping


async def test_what_kills_every_executor_ends_the_engine_with_one_clear_reason(checkpoint: Path) -> None:
    async with running(configured(checkpoint, max_restarts=1), QuickSystem) as system:
        streams = [
            system.ingress.open(random_tokens(9, index), PARAMS[0].replace(max_tokens=400)) for index in range(4)
        ]

        async def kill() -> None:
            for _ in range(2):
                await until(lambda: not system.ingress.recovering and bool(children()))
                pid = send(signal.SIGKILL)
                await until(lambda: not alive(pid))  # noqa: B023

        killing = asyncio.ensure_future(kill())
        said = r"executor0 was killed by SIGKILL; 1 restarts in 300 s did not help"
        for stream in streams:
            with pytest.raises(EngineDied, match=said):
                await stream.collect()
        with pytest.raises(EngineDied, match=said):
            await system.wait()
        await killing


async def test_an_executor_that_raises_is_restarted_and_its_words_are_logged(
    checkpoint: Path, undisturbed: list[tuple[bytes, Finish]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running(configured(checkpoint)) as system:
            streams = open_all(system)
            await streams[0]._arrived.wait()
            system.executors.links[0].put(Step(step_id=10**6, decode_rows=b"abc"))  # three bytes are no int32 column
            assert outputs(await read_all(streams)) == undisturbed
    assert "executor0 crashed: ValueError: buffer size must be a multiple of element size" in caplog.text


async def test_a_fault_in_this_process_is_cured_in_place(
    checkpoint: Path, undisturbed: list[tuple[bytes, Finish]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0

    def faulty(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*arguments: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps in (5, 60, 61):
                raise RuntimeError("device-side assert triggered")
            return compute(*arguments)

        return computed

    monkeypatch.setattr(Decoder, "logits", faulty(Decoder.logits))
    monkeypatch.setattr(CompiledDecodes, "launch", faulty(CompiledDecodes.launch))  # decode steps of small models
    async with running(configured(checkpoint, "inline")) as system:
        assert outputs(await read_all(open_all(system))) == undisturbed
        assert system.executors.num_restarts == 3


async def test_a_hang_in_this_process_is_a_clear_failure(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, others = threading.Event(), {*threading.enumerate()}

    def stuck(self: Decoder, step: Any) -> torch.Tensor:
        let_go.wait(far(30))
        raise RuntimeError("let go")

    monkeypatch.setattr(Decoder, "forward", stuck)
    try:
        async with running(configured(checkpoint, "inline", step_timeout_s=0.5)) as system:
            stream = system.ingress.open(random_tokens(9, 0), PARAMS[0])
            with pytest.raises(EngineDied, match="executor0 does not finish its step; this process cannot repair it"):
                await stream.collect()
    finally:
        let_go.set()
        for thread in threading.enumerate():
            if thread.name == "executor0" and thread not in others:
                thread.join(far(5))


async def test_tcp_links_recover_as_unix_ones_do(checkpoint: Path, quick_ones: list[tuple[bytes, Finish]]) -> None:
    async with running(configured(checkpoint, link="tcp://127.0.0.1:0"), QuickSystem) as system:
        streams = open_all(system)
        await streams[0]._arrived.wait()
        send(signal.SIGKILL)
        assert outputs(await read_all(streams)) == quick_ones


async def test_sockets_are_gone_as_soon_as_they_are_connected(checkpoint: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    async with running(configured(checkpoint, link=f"unix:{tmp_path}"), QuickSystem) as system:
        assert os.listdir(tmp_path) == []
        send(signal.SIGKILL)
        await until(lambda: system.executors.last_recovery_s > 0)
        assert os.listdir(tmp_path) == []
