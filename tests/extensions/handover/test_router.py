"""The router of a split engine without engines: its headers, the processes that it starts, what it refuses."""

import asyncio
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

import aiohttp
import pytest

from engine.config import Config
from engine.types.errors import ConfigError
from server.extensions.handover.extension import EXTENSION
from server.extensions.handover.header import HEADER
from server.extensions.handover.processes import LocalFleet
from server.extensions.handover.split import SplitProxy, SplitReplicas
from server.extensions.replicas.router import routing
from server.http.listener import bind, url_of
from server.proxy.replica import State
from tests.extensions.replicas.fake_replica import FakeFleet
from tests.pace import far


async def test_engines_get_the_router_s_own_header_and_never_a_client_s() -> None:
    fleet = FakeFleet(2)
    with bind("127.0.0.1", 0) as listener:
        url = f"{url_of(listener)}/v1/completions"
        async with (
            routing(Config(), fleet, listener, SplitReplicas, SplitProxy) as replicas,
            aiohttp.ClientSession() as session,
        ):
            async with asyncio.timeout(far(20)):
                while any(one.state is not State.READY for one in replicas.all):
                    await asyncio.sleep(0.01)
            for prompt in ("x", "x" * 300):
                given = {HEADER: '{"offer": "of the client"}'}
                async with session.post(url, json={"prompt": prompt}, headers=given) as answer:
                    assert answer.status == 200
            got = [headers.getall(HEADER) for fake in fleet.replicas for headers in fake.headers]
        for fake in fleet.replicas:
            await fake.stop()
    assert len(got) == 3, "a short prompt goes to one engine, a long one to two"
    assert all(len(values) == 1 for values in got)
    assert "client" not in str(got)
    assert [values for values in got if values == ["{}"]], "the short prompt has no wish"


def test_an_interrupt_at_a_terminal_does_not_reach_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec cat\n")
    engine.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(engine))
    fleet = LocalFleet(Config(), 1)
    try:
        assert os.getpgid(fleet._processes[0].pid) != os.getpgrp()
    finally:
        fleet.close()


@pytest.mark.parametrize("other", [{"replicas": 2}, {"on": "ray"}, {"fleet": "main"}])
def test_two_ways_to_serve_are_refused(other: dict[str, object]) -> None:
    given = {"prefill": 1, "decode": None, "replicas": None, "on": None, "fleet": None, "target": "x", **other}
    with pytest.raises(ConfigError, match="leave out --replicas, --on and --fleet"):
        EXTENSION.serving(Namespace(**given), Config())


def test_an_engine_that_ends_soon_is_started_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = object.__new__(LocalFleet)
    fleet._started_at, fleet._num_failed = [100.0], [0]
    monkeypatch.setattr(time, "monotonic", lambda: 105.0)
    assert [fleet._pause_s(0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    assert fleet._pause_s(0) == 0
    monkeypatch.setattr(time, "monotonic", lambda: 105.0)
    assert fleet._pause_s(0) == 1


async def test_an_engine_that_an_operator_starts_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec cat\n")
    engine.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(engine))
    fleet = LocalFleet(Config(), 1)
    try:
        fleet._processes[0].kill()
        fleet._processes[0].wait()
        finding = asyncio.ensure_future(fleet.url(0))
        await asyncio.sleep(0.05)  # it waits for a second
        await fleet.stop(0)
        await fleet.start(0)
        started = fleet._processes[0]
        assert await finding == ""
        assert fleet._processes[0] is started
        assert started.poll() is None
    finally:
        fleet.close()
