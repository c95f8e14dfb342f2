"""What observers of a whole engine are told, from the first request to the end."""

import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import Config, build_config
from engine.control.system import System
from engine.kv.node import SHARED, namespace_seed
from engine.messages import Finish, RequestOptions
from engine.types.errors import EngineDied, PluginError
from engine.types.params import SamplingParams
from engine.types.prompt import Origin
from tests.models.checkpoints import build, random_tokens, save
from tests.plugins.conftest import Install

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PAGE = 16
SPY = """
from engine.plugins.hookspecs import hookimpl

CALLBOARD_PLUGIN = {"api": 1}
requests, events, calls = [], [], []

class Spy:
    @hookimpl
    def callboard_request_finished(self, requests):
        calls.append("finished")
        globals()["requests"] += requests

    @hookimpl
    def callboard_kv_event(self, events):
        calls.append("event")
        globals()["events"] += events

    @hookimpl
    def callboard_engine_stopped(self):
        calls.append("stopped")

@hookimpl
def callboard_observer(context):
    return Spy()
"""
COUNTING = """
from engine.plugins.hookspecs import hookimpl

CALLBOARD_PLUGIN = {"api": 1}
requests = []

@hookimpl
def callboard_request_finished(requests):
    globals()["requests"] += requests
"""
RAISING = """
from engine.plugins.hookspecs import hookimpl

CALLBOARD_PLUGIN = {"api": 1}

@hookimpl
def callboard_request_finished(requests):
    raise ValueError("planted")

@hookimpl
def callboard_kv_event(events):
    raise ValueError("planted")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def spies(install: Install) -> Any:
    """The modules 'spy' and 'counting' of a distribution, which keep what they are told."""
    points = {"observer.spy": "spy", "observer.counting": "counting", "observer.raising": "raising"}
    install("acme", points, {"spy.py": SPY, "counting.py": COUNTING, "raising.py": RAISING})


@asynccontextmanager
async def running(checkpoint: Path, observers: list[str], **plugins: object) -> AsyncIterator[System]:
    tables = {
        "model": {"path": str(checkpoint), "tokenizer": "none"},
        "kv": {"num_pages": 8, "page_size": PAGE},
        "plugins": {"observers": observers, **plugins},
    }
    system = System(build_config(Config(), tables))
    await system.start()
    try:
        yield system
    finally:
        await system.stop(drain_timeout_s=1)


def page_names(tokens: list[int], count: int) -> list[bytes]:
    """As docs/plugins.md says."""
    names = [namespace_seed(SHARED)]
    for start in range(0, count * PAGE, PAGE):
        page = np.array(tokens[start : start + PAGE], dtype="<i4").tobytes()
        names.append(hashlib.sha256(names[-1] + page).digest())
    return names


async def test_observers_learn_what_requests_cost_and_which_pages_are_where(checkpoint: Path, spies: None) -> None:
    prompt, other = random_tokens(40, 0), random_tokens(110, 1)
    began = time.monotonic()
    async with running(checkpoint, ["spy", "log"]) as system:
        for tokens in (prompt, prompt, other):
            await system.ingress.open(tokens, GREEDY).collect()
    took_s = time.monotonic() - began
    import spy

    assert spy.calls[-1] == "stopped"
    assert spy.calls.count("stopped") == 1
    assert [one.num_prompt_tokens for one in spy.requests] == [40, 40, 110]
    assert [one.cached_tokens for one in spy.requests] == [0, 2 * PAGE, 0]
    assert len({one.request_id for one in spy.requests}) == 3
    for one in spy.requests:
        assert (one.num_output_tokens, one.finish, one.num_retractions) == (8, Finish.LENGTH, 0)
        assert 0 <= one.queue_s <= one.ttft_s <= one.e2e_s <= took_s
        assert one.e2e_s == pytest.approx(one.ttft_s + 7 * one.tpot_s)
    assert [one.arrived_at for one in spy.requests] == sorted(one.arrived_at for one in spy.requests)

    names = page_names(prompt, 2)
    stored = spy.events[0]
    assert (stored.kind, stored.tier, stored.namespace) == ("stored", "device", SHARED)
    assert (stored.parent, stored.hashes) == (names[0], tuple(names[1:]))
    assert stored.tokens == np.array(prompt[: 2 * PAGE], dtype=np.int32).tobytes()
    # 110 + 8 tokens need all eight pages.
    gone = {name for event in spy.events if event.kind == "removed" for name in event.hashes}
    assert gone == set(names[1:])
    cached = set()
    for event in spy.events:
        assert event.parent in cached | {names[0]}
        cached = cached - {*event.hashes} if event.kind == "removed" else cached | {*event.hashes}
    assert set(page_names(other, 6)[1:]) <= cached
    assert len(cached) == 7


async def test_observers_learn_who_asked_of_which_model_and_when(checkpoint: Path, spies: None) -> None:
    began = time.time()
    options = RequestOptions(priority=3, origin=Origin("acme", "invoice-7"))
    async with running(checkpoint, ["spy"]) as system:
        await system.ingress.open(random_tokens(20, 0), GREEDY, options).collect()
        await system.ingress.open(random_tokens(20, 1), GREEDY).collect()
        name = system.model_name
    import spy

    first, second = spy.requests
    assert (first.priority, first.client, first.client_request_id, first.model) == (3, "acme", "invoice-7", name)
    assert (second.priority, second.client, second.client_request_id, second.model) == (0, "", "", name)
    assert began <= first.ended_at_unix_s <= second.ended_at_unix_s <= time.time()


async def test_a_cancelled_request_is_told_too(checkpoint: Path, spies: None) -> None:
    async with running(checkpoint, ["spy"]) as system:
        stream = system.ingress.open(random_tokens(20, 0), GREEDY.replace(max_tokens=100))
        await stream.next()
        stream.close()
    import spy

    (one,) = spy.requests
    assert one.finish == Finish.ABORT
    assert 1 <= one.num_output_tokens <= 100


async def test_no_event_is_recorded_when_nobody_is_told(checkpoint: Path, spies: None) -> None:
    async with running(checkpoint, ["counting"]) as system:
        await system.ingress.open(random_tokens(40, 0), GREEDY).collect()
        planner = system.scheduler._planner
        assert planner is not None
        assert planner.pages.tree._events is None
    import counting

    assert len(counting.requests) == 1


async def test_requests_and_other_observers_do_not_notice_one_that_raises(
    checkpoint: Path, spies: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(checkpoint, ["raising", "spy"]) as system:
        for seed in range(3):
            delta = await system.ingress.open(random_tokens(40, seed), GREEDY).collect()
            assert delta.finish == Finish.LENGTH
        assert system.died is None
    import spy

    assert len(spy.requests) == 3
    assert {event.kind for event in spy.events} == {"stored"}
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "plugin observer.raising raised in" in record.getMessage()


async def test_the_end_is_told_after_a_crash(checkpoint: Path, spies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("planted")

    async with running(checkpoint, ["spy"]) as system:
        monkeypatch.setattr(system.tokenizer, "handle", broken)
        stream = system.ingress.open(random_tokens(20, 0), GREEDY)
        with pytest.raises(EngineDied, match="tokenizer crashed"):
            await stream.collect()
    import spy

    assert spy.calls == ["stopped"]


@pytest.mark.parametrize("name", ["fair", "fcfs", "lpm", "priority"])
async def test_every_policy_serves(checkpoint: Path, name: str) -> None:
    async with running(checkpoint, [], policy=name) as system:
        streams = [system.ingress.open(random_tokens(40, seed % 2), GREEDY) for seed in range(6)]
        outputs = [(await stream.collect()).token_ids for stream in streams]
        assert outputs[:2] * 3 == outputs


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ({"policy": "nonsense"}, "available: fair, fcfs, lpm, priority"),
        ({"observers": ["nonsense"]}, "available: kv_events, log"),
        ({"observers": ["log"], "options": {"observer.log": {"sped": 1}}}, "sped"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(checkpoint: Path, plugins: dict[str, Any], said: str) -> None:
    tables = {"model": {"path": str(checkpoint), "tokenizer": "none"}, "plugins": plugins}
    with pytest.raises(PluginError, match=said):
        System(build_config(Config(), tables))


def test_a_backend_that_does_not_fit_the_model_is_found_before_anything_is_loaded(
    checkpoint: Path, install: Install
) -> None:
    install("acme", {"attention.small": "small"}, {"small.py": 'CALLBOARD_PLUGIN = {"api": 1, "head_sizes": [8]}\n'})
    tables = {"model": {"path": str(checkpoint), "tokenizer": "none"}, "plugins": {"attention": "small"}}
    with pytest.raises(PluginError, match=r"attention\.small .*head size 32, it takes 8; can run here: .*torch"):
        System(build_config(Config(), tables))
