"""Every limit and time of the configuration is reached here; a new one needs a function before it may go in."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable

import pytest

from engine.config import Config, build_config
from engine.control.system import RESTART_WINDOW_S, System
from engine.messages import Step
from engine.settings.sections import LimitsSection, PlacementSection, ServerSection
from engine.types.errors import EngineDied, RequestError
from engine.types.notices import ExecutorsLost
from engine.types.params import SamplingParams
from engine.workers.messages import WorkerAlive
from server.http.sse import PING_COMMENT
from tests.actors.test_ingress import with_ingress
from tests.pace import far
from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer
from tests.server.test_serve import process, start_stream
from tests.workers.machines import configured
from tests.workers.test_cluster import on_two_machines
from tests.workers.test_executors import Bench, FakePlacement, leaving_nothing

BODY = json.dumps({"model": MODEL, "prompt": "p"}).encode()
HANG = json.dumps({"model": MODEL, "prompt": "!hang", "stream": True}).encode()
SECTIONS = {"limits": LimitsSection, "server": ServerSection, "placement": PlacementSection}


async def refused(second: list[int], **limits: int) -> None:
    """One request is open, and the next is refused."""

    async with with_ingress(**limits) as (ingress, _):
        ingress.open([1] * 8, SamplingParams())
        with pytest.raises(RequestError) as found:
            ingress.open(second, SamplingParams())
        assert found.value.status == 429


async def expires(code: str, **limits: float) -> None:
    """A request that gets nothing ends."""

    async with with_ingress(**limits) as (ingress, _):
        with pytest.raises(RequestError) as found:
            async with asyncio.timeout(far(5)):
                await ingress.open("hello", SamplingParams()).collect()
        assert found.value.code == code


def max_requests_per_client() -> None:
    with LiveServer(limits=LimitsSection(max_requests_per_client=1)) as live, RawClient(live.port) as client:
        client.send(http_bytes("POST", "/v1/completions", HANG))
        assert live.wait_until(lambda: live.ingress.num_open == 1, 2)
        assert ask(live.port, "POST", "/v1/completions", BODY).error["code"] == "client_queue_full"


def rate(**limits: int) -> None:
    """A client may not begin another request this minute."""
    with LiveServer(limits=LimitsSection(**limits)) as live:
        assert ask(live.port, "POST", "/v1/completions", BODY).status == 200
        assert ask(live.port, "POST", "/v1/completions", BODY).error["code"] == "rate_limit_exceeded"


def max_connections() -> None:
    """Beyond them, but for probes, a connection is refused while requests are answered in all."""
    section = ServerSection(max_connections=1, max_connections_per_address=9)
    with LiveServer(server=section) as live, RawClient(live.port) as first:
        first.send(http_bytes("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "!hang"}).encode()))
        assert live.wait_until(lambda: live.ingress.num_open == 1, 2)
        assert ask(live.port, "POST", "/v1/completions", BODY).error["code"] == "too_many_connections"
        assert ask(live.port, "GET", "/health").status == 200


def max_connections_per_address() -> None:
    """The connection of the address that has rested longest is closed for a new one."""
    with LiveServer(server=ServerSection(max_connections_per_address=1)) as live, RawClient(live.port) as first:
        assert ask(live.port, "GET", "/health").status == 200
        assert first.seconds_until_closed() < 5


def max_body_bytes() -> None:
    with LiveServer(server=ServerSection(max_body_bytes=1024)) as live:
        for length, status in ((1024, 200), (1025, 413)):
            assert ask(live.port, "POST", "/v1/completions", BODY.ljust(length)).status == status


def client_timeout() -> None:
    with LiveServer(server=ServerSection(client_timeout_s=0.2)) as live:
        begun = {"header": b"GET /health HT", "body": http_bytes("POST", "/tokenize", b"", {"Content-Length": "9"})}
        for part, data in begun.items():
            with RawClient(live.port) as client:
                client.send(data)
                assert client.read_reply().error["code"] == f"{part}_timeout"


def ping_after() -> None:
    with LiveServer(server=ServerSection(ping_after_s=0.02)) as live, RawClient(live.port) as client:
        client.send(http_bytes("POST", "/v1/completions", HANG))
        client.read_until(PING_COMMENT)


def drain_timeout() -> None:
    with process(delay_s=0.2, server={"drain_timeout_s": 0.1}) as server, start_stream(server.port) as client:
        server.signal(signal.SIGTERM)
        assert client.read_reply().events[-2]["error"]["code"] == "shutting_down"
        server.exit()


async def join_timeout() -> None:
    async with on_two_machines(configured(join_timeout_s=0.2)) as scene:
        with pytest.raises(EngineDied, match=r"nobody listens at .* since 0\.2 s"):
            await scene.join()


def system(**placement: float) -> System:
    return System(build_config(Config(), {"placement": placement}))


async def step_timeout() -> None:
    async with leaving_nothing():
        bench = Bench(step_s=system(step_timeout_s=0.05).executors._group._patience.step_s)
        (await bench.generation(1)).ready()
        await asyncio.sleep(0)
        bench.group.links[0].put(Step(step_id=0))
        await bench.generation(2)
        assert bench.heard[-1] == ExecutorsLost(reason="executor0 does not finish its step")
        await bench.stop()


async def silence_timeout() -> None:
    async with leaving_nothing():
        patience = system(executor="process", silence_timeout_s=0.05).executors._group._patience
        bench = Bench(FakePlacement(silence_timeout_s=patience.silence_s))
        ranks = await bench.generation(1)
        ranks.ready()
        ranks.hear(0, WorkerAlive())
        await bench.generation(2)
        assert bench.heard[-1] == ExecutorsLost(reason="executor0 has stopped answering")
        await bench.stop()


def max_restarts() -> None:
    intensity = system(max_restarts=2).executors._group.intensity
    for now in (0.0, 1.0, RESTART_WINDOW_S):  # by then the first is forgotten
        intensity.spend("lost", now)
    with pytest.raises(EngineDied, match="2 restarts in 300 s did not help"):
        intensity.spend("lost", RESTART_WINDOW_S)


REACH: dict[str, Callable[[], Awaitable[None] | None]] = {
    "limits.max_requests": lambda: refused([1], max_requests=1),
    "limits.max_queued_tokens": lambda: refused([1] * 3, max_queued_tokens=10),
    "limits.max_requests_per_client": max_requests_per_client,
    "limits.requests_per_minute": lambda: rate(requests_per_minute=1),
    "limits.tokens_per_minute": lambda: rate(tokens_per_minute=1),
    "limits.first_token_timeout_s": lambda: expires("queue_timeout", first_token_timeout_s=0.02),
    "limits.request_timeout_s": lambda: expires("request_timeout", request_timeout_s=0.02),
    "server.max_connections": max_connections,
    "server.max_connections_per_address": max_connections_per_address,
    "server.max_body_bytes": max_body_bytes,
    "server.client_timeout_s": client_timeout,
    "server.ping_after_s": ping_after,
    "server.drain_timeout_s": drain_timeout,
    "placement.join_timeout_s": join_timeout,
    "placement.step_timeout_s": step_timeout,
    "placement.silence_timeout_s": silence_timeout,
    "placement.max_restarts": max_restarts,
}


def limits() -> list[str]:
    """Settings that bound something: all of [limits], elsewhere what is called a most or a time."""
    return [
        f"{section}.{key}"
        for section, kind in SECTIONS.items()
        for key in kind.__struct_fields__
        if section == "limits" or key.startswith("max_") or key.endswith("_s")
    ]


@pytest.mark.reliability("G3", "every limit of the configuration looked up among the tests")  # as measured last
@pytest.mark.parametrize("setting", limits())
async def test_it_is_reached(setting: str) -> None:
    assert setting in REACH, f"{setting} bounds something, and nothing here runs into it"
    running = REACH[setting]()
    if running is not None:
        await running


def test_nothing_is_reached_that_is_no_limit() -> None:
    assert set(REACH) == set(limits())
