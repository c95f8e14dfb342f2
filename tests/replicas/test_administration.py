"""Aborting and resetting through a router: every replica is asked, and their answers become one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, ClassVar

import aiohttp
import pytest

from engine.config import Config, build_config
from engine.settings.sections import ServerSection
from server.http.listener import bind
from server.replicas import administration
from server.replicas.replica import Replicas, State
from server.replicas.router import routing
from tests.pace import far
from tests.server.http_client import as_operator
from tests.server.live_server import MODEL, LiveServer

Ask = Callable[..., Awaitable[tuple[int, Any]]]
NUM_REPLICAS = 2


class LiveFleet:
    """See ``Fleet``; of servers that run already."""

    size = NUM_REPLICAS

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, servers: list[LiveServer]) -> None:
        self._servers = servers

    async def url(self, number: int) -> str:
        return self._servers[number].url

    async def stop(self, number: int) -> None:
        """They stop with the test."""

    async def start(self, number: int) -> None:
        """They run."""

    def close(self) -> None:
        """They stop with the test."""


@asynccontextmanager
async def routed_servers(key: str = "") -> AsyncIterator[tuple[list[LiveServer], Ask, Replicas]]:
    """Servers, what asks their router, and the router's replicas."""
    with ExitStack() as stack:
        servers = [stack.enter_context(LiveServer(server=ServerSection(api_key=key))) for _ in range(NUM_REPLICAS)]
        listener = stack.enter_context(bind("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = build_config(Config(), {"server": {"api_key": key}})
        async with (
            routing(config, LiveFleet(servers), listener) as replicas,
            aiohttp.ClientSession(url, headers=as_operator()) as client,
        ):
            async with asyncio.timeout(far(20)):
                while not all(one.state is State.READY for one in replicas.all):
                    await asyncio.sleep(0.005)

            async def ask(
                path: str, body: dict[str, Any] | None = None, method: str = "POST", **headers: str
            ) -> tuple[int, Any]:
                if key:
                    headers.setdefault("Authorization", f"Bearer {key}")
                proxy = url if path.startswith("http") else None  # which is sent the whole of an address
                async with client.request(method, path, json=body, headers=headers, proxy=proxy) as response:
                    is_json = response.content_type == "application/json"
                    return response.status, await (response.json() if is_json else response.text())

            yield servers, ask, replicas


async def open_everywhere(servers: list[LiveServer], ask: Ask) -> list["asyncio.Task[tuple[int, Any]]"]:
    """A request that hangs on each replica, "r0" and so on."""
    tasks = []
    for number in range(len(servers)):
        headers = {"X-Request-Id": f"r{number}"}
        body = {"model": MODEL, "prompt": f"!hang {number}"}  # the same one would go to the same replica
        tasks.append(asyncio.ensure_future(ask("/v1/completions", body, **headers)))
        async with asyncio.timeout(far(10)):
            while sum(server.ingress.num_open for server in servers) <= number:
                await asyncio.sleep(0.005)
    assert [server.ingress.num_open for server in servers] == [1] * len(servers)
    return tasks


@pytest.mark.parametrize("key", ["", "k" * 16])
async def test_a_request_is_found_wherever_it_is(key: str) -> None:
    async with routed_servers(key) as (servers, ask, _):
        tasks = await open_everywhere(servers, ask)
        assert await ask("/abort_request", {"rid": ["r1", "nobody"]}) == (
            200,
            {"num_aborted": 1, "unknown": ["nobody"]},
        )
        assert (await tasks[1])[1]["choices"][0]["finish_reason"] == "abort"
        assert sum(server.ingress.num_open for server in servers) == 1
        assert await ask("/abort_requests", {"abort_all": True}) == (200, {"num_aborted": 1, "unknown": []})
        assert (await tasks[0])[0] == 200
        status, body = await ask("/abort_request", {"rid": "r0"})
        assert (status, body["error"]["code"]) == (404, "request_not_found")
        status, body = await ask("/abort_request", {})
        assert (status, body["error"]["param"]) == (400, "rid")


async def test_all_of_them_forget() -> None:
    async with routed_servers() as (servers, ask, _):
        assert await ask("/reset_prefix_cache", {}) == (200, {"success": True})
        tasks = await open_everywhere(servers, ask)
        salts = {server.ingress.asked[-1][2].cache_salt for server in servers}
        assert len(salts) == NUM_REPLICAS
        assert "" not in salts
        await ask("/abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)


async def test_all_of_them_forget_without_a_body() -> None:
    async with routed_servers() as (servers, ask, _):
        page = {"Sec-Fetch-Site": "cross-site"}
        assert (await ask("/flush_cache", **page))[0] == 403
        assert await ask("/flush_cache?timeout=0") == (200, {"success": True})
        tasks = await open_everywhere(servers, ask)
        salts = {server.ingress.asked[-1][2].cache_salt for server in servers}
        assert len(salts - {""}) == NUM_REPLICAS
        await ask("/abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)


async def test_a_wrong_key_reaches_none() -> None:
    async with routed_servers("k" * 16) as (_, ask, _):
        for path in ("/abort_request", "/reset_prefix_cache"):
            assert (await ask(path, {}, Authorization="Bearer x"))[0] == 401


async def test_a_replica_that_is_not_ready_now_is_asked_as_well() -> None:
    async with routed_servers() as (servers, ask, replicas):
        tasks = await open_everywhere(servers, ask)
        for server, replica in zip(servers, replicas.all, strict=True):
            server.ingress.ready = False
            replicas.lose(replica, "it recovers")
        assert await ask("/abort_request", {"rid": ["r0", "r1"]}) == (200, {"num_aborted": 2, "unknown": []})
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_one_that_does_not_answer_may_not_have_forgotten_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "CHECK_TIMEOUT_S", 0.3)
    accepted = []

    async with routed_servers() as (_, ask, replicas):
        silent = await asyncio.start_server(lambda *streams: accepted.append(streams), "127.0.0.1", 0)
        async with silent, asyncio.timeout(far(10)):
            replicas.all[0].url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
            status, answer = await ask("/reset_prefix_cache", {})
            for _, writer in accepted:
                writer.close()
        assert (status, answer["error"]["code"]) == (503, "replica_lost")
        assert accepted


async def test_a_request_is_explained_by_the_replica_that_had_it() -> None:
    async with routed_servers(key="s3cret and longer") as (_, ask, _):
        assert (await ask("/v1/completions", {"model": MODEL, "prompt": "p"}, **{"X-Request-Id": "a-b"}))[0] == 200
        status, told = await ask("/explain/a-b", method="GET")
        assert (status, told["id"], told["ended"]) == (200, "a-b", True)
        status, told = await ask("/explain/nobody", method="GET")
        assert (status, told["error"]["code"]) == (404, "request_not_found")
