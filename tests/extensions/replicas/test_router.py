"""The router over replicas that answer as told: who is sent what, what is tried again, draining, coming back."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from engine.config import Config, build_config
from engine.settings.sections import LimitsSection, ServerSection
from server.extensions.replicas import replicas as replicas_module
from server.extensions.replicas.replicas import Replicas
from server.extensions.replicas.router import routing
from server.extensions.replicas.routing import SLACK_REQUESTS
from server.generate.route import GenerateRoute
from server.http.body import ROUTED_TYPE
from server.http.exchange import USAGE_HEADER
from server.http.listener import bind
from server.proxy import proxy
from server.proxy.passage import Passage
from server.proxy.replica import State
from server.run.app import create_runner
from server.run.core import all_parts
from server.run.extension import declared
from tests.extensions.replicas.fake_replica import FakeFleet, FakeLastingFleet
from tests.pace import far
from tests.server.http_client import as_operator
from tests.server.live_server import LiveServer

LONG = "the quick brown fox jumps over the lazy dog. " * 40


class Routed:
    """A running router, its fleet, and a client."""

    def __init__(self, fleet: FakeFleet, replicas: Replicas, client: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self.replicas = replicas
        self.client = client

    async def complete(self, prompt: str = "x", **headers: str) -> tuple[int, dict]:
        async with self.client.post("/v1/completions", json={"prompt": prompt}, headers=headers) as response:
            return response.status, await response.json()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(far(20)):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def routed(
    size: int = 2, config: Config | None = None, new_fleet: Callable[[int], FakeFleet] = FakeFleet
) -> AsyncIterator[Routed]:
    fleet = new_fleet(size)
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        async with (
            routing(config or Config(), fleet, listener) as replicas,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=as_operator()) as client,
        ):
            one = Routed(fleet, replicas, client)
            await one.until(lambda: all(replica.state is State.READY for replica in replicas.all))
            try:
                yield one
            finally:
                for fake in fleet.replicas:
                    await fake.stop()
    await asyncio.sleep(0.05)  # what the router asked of a replica that was just ending is closed by now


@pytest.fixture(autouse=True)
def _check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "CHECK_EVERY_S", 0.01)


async def test_a_request_arrives_whole_and_so_does_its_response() -> None:
    async with routed() as one:
        body = {"prompt": "hello", "n": 2}
        async with one.client.post(
            "/v1/completions?a=b", json=body, headers={"X-Request-Id": "mine", "Authorization": "Bearer k"}
        ) as response:
            assert response.status == 200
            assert response.headers["X-Own"] == "yes"
            assert response.headers["X-Request-Id"] == "mine"
            name = (await response.json())["from"]
        fake = next(fake for fake in one.fleet.replicas if fake.name == name)
        assert json.loads(fake.bodies[0])["request"] == body
        assert fake.seen == {"/v1/completions?a=b": 1}
        assert fake.headers[0]["X-Request-Id"] == "mine"
        assert fake.headers[0]["Authorization"] == "Bearer k"


async def test_equal_beginnings_go_to_one_replica_and_others_spread() -> None:
    async with routed() as one:
        names = {(await one.complete(LONG + str(number)))[1]["from"] for number in range(10)}
        assert len(names) == 1
        names = {(await one.complete(f"{number} {LONG}"))[1]["from"] for number in range(14)}
        assert names == {"fake0", "fake1"}
        assert [replica.num_sent for replica in one.replicas.all] == [12, 12]
        async with one.client.get("/replicas") as response:
            listed = await response.json()
        assert (listed["requests"], listed["requests_with_prefix"]) == (24, 9)
        assert [replica["state"] for replica in listed["replicas"]] == ["ready", "ready"]


async def test_one_that_is_far_busier_loses_its_prefix() -> None:
    async with routed() as one:
        for fake in one.fleet.replicas:
            fake.hold.clear()
        asking = [asyncio.create_task(one.complete(LONG)) for _ in range(SLACK_REQUESTS + 6)]
        await one.until(lambda: sum(replica.num_open for replica in one.replicas.all) == len(asking))
        counts = sorted(replica.num_open for replica in one.replicas.all)
        assert counts[0] > 0
        assert counts[1] <= SLACK_REQUESTS + 1 + counts[0]
        for fake in one.fleet.replicas:
            fake.hold.set()
        assert all(status == 200 for status, _ in await asyncio.gather(*asking))
        assert all(replica.num_open == 0 for replica in one.replicas.all)


@pytest.mark.parametrize("behaviour", ["die", "full"])
async def test_what_one_cannot_take_another_one_does(behaviour: str) -> None:
    async with routed() as one:
        (_, first), other = await one.complete(LONG), 0
        owner = next(fake for fake in one.fleet.replicas if fake.name == first["from"])
        owner.behaviour = behaviour
        for _ in range(5):
            status, answer = await one.complete(LONG + "more")
            other += answer.get("from") not in (None, owner.name)
            assert status == 200
        assert other >= 1


async def test_if_all_are_full_the_client_hears_it_from_one() -> None:
    async with routed() as one:
        for fake in one.fleet.replicas:
            fake.behaviour = "full"
        async with one.client.post("/v1/completions", json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
        assert sum(len(fake.bodies) for fake in one.fleet.replicas) == 2


async def test_killing_a_replica_loses_no_request_that_was_accepted() -> None:
    async with routed() as one:
        for fake in one.fleet.replicas:
            fake.hold.clear()
        asking = [asyncio.create_task(one.complete(f"{number} {LONG}")) for number in range(12)]
        await one.until(lambda: sum(replica.num_open for replica in one.replicas.all) == 12)
        assert one.replicas.all[0].num_open > 0
        await one.fleet.lose(0)
        one.fleet.replicas[1].hold.set()
        assert {(status, answer["from"]) for status, answer in await asyncio.gather(*asking)} == {(200, "fake1")}
        await one.until(lambda: one.replicas.all[0].state is State.READY)
        assert one.replicas.all[0].num_lost == 1


@pytest.mark.parametrize("behaviour", ["die late", "lie late"])
async def test_a_stream_goes_on_at_the_next_replica_and_not_for_ever(behaviour: str) -> None:
    async with routed() as one:
        for fake in one.fleet.replicas:
            fake.behaviour = behaviour
        for path, name, end in (("/v1/completions", "", "data: [DONE]\n\n"), ("/v1/messages", "event: error\n", "")):
            await one.until(lambda: all(replica.state is State.READY for replica in one.replicas.all))
            async with one.client.post(path, json={"prompt": "x", "stream": True}) as response:
                assert response.status == 200
                text = await response.text()
            assert text.endswith("\n\n" + end)
            *events, last, _ = text.removesuffix(end).split("\n\n")
            assert events == ["data: 1"] * 3
            assert last.startswith(name + "data: ")
            assert "send it again" in json.loads(last.rpartition("data: ")[2])["error"]["message"]
        bodies = [json.loads(body) for fake in one.fleet.replicas for body in fake.bodies]
        told = sorted((body["origin"]["told"].get("0", {}).get("tokens", "") for body in bodies), key=len)
        assert told == ["", "", "AQAAAA==", "AQAAAA==", "AQAAAAEAAAA=", "AQAAAAEAAAA="]
        assert len({body["origin"]["seed"] for body in bodies}) == 2


async def test_a_stream_that_had_not_begun_begins_elsewhere() -> None:
    async with routed() as one:
        one.fleet.replicas[0].behaviour, one.fleet.replicas[1].behaviour = "die", "stream"
        for number in range(4):
            body = {"prompt": f"{number} {LONG}", "stream": True}
            async with one.client.post("/v1/completions", json=body) as response:
                assert await response.text() == "data: 1\n\ndata: [DONE]\n\n"


async def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    async with routed() as one:
        for fake in one.fleet.replicas:
            fake.hold.clear()
        asking = asyncio.create_task(one.complete())
        await one.until(lambda: any(fake.bodies for fake in one.fleet.replicas))
        asking.cancel()
        await one.until(lambda: sum(fake.num_left for fake in one.fleet.replicas) == 1)
        await one.until(lambda: all(replica.num_open == 0 for replica in one.replicas.all))


async def test_a_client_that_is_gone_when_its_stream_is_written_costs_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ToNobody(web.StreamResponse):
        async def write(self, data: object) -> None:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async with routed() as one:
        for fake in one.fleet.replicas:
            fake.behaviour = "stream"
        monkeypatch.setattr(proxy, "web", SimpleNamespace(Response=web.Response, StreamResponse=ToNobody))
        async with (
            asyncio.timeout(far(20)),
            one.client.post("/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            assert await response.text() == ""
        assert sum(len(fake.bodies) for fake in one.fleet.replicas) == 1
        assert [replica.num_lost for replica in one.replicas.all] == [0, 0]
        assert all(replica.num_open == 0 for replica in one.replicas.all)


async def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_more() -> None:
    async with routed() as one:
        one.fleet.replicas[0].hold.clear()
        one.fleet.replicas[1].hold.clear()
        asking = [asyncio.create_task(one.complete(f"{number} {LONG}")) for number in range(4)]
        await one.until(lambda: all(replica.num_open == 2 for replica in one.replicas.all))
        async with one.client.post("/replicas/replica0/drain") as response:
            assert response.status == 202
        await one.until(lambda: one.replicas.all[0].state is State.DRAINING)
        one.fleet.replicas[1].hold.set()
        for _ in range(4):
            assert (await one.complete())[1]["from"] == "fake1"
        assert one.fleet.stopped == []
        one.fleet.replicas[0].hold.set()
        assert all(status == 200 for status, _ in await asyncio.gather(*asking))
        await one.until(lambda: one.replicas.all[0].state is State.STOPPED)
        assert one.fleet.stopped == [0]
        async with one.client.post("/replicas/other/drain") as response:
            assert response.status == 404
            assert "replica0, replica1" in (await response.json())["error"]["message"]


async def test_without_a_replica_it_is_a_503_that_may_be_tried_again() -> None:
    async with routed(size=1) as one:
        one.fleet.replicas[0].ready = False
        await one.until(lambda: one.replicas.all[0].state is State.STARTING)
        async with one.client.post("/v1/completions", json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert (await response.json())["error"]["code"] == "no_replica"
        async with one.client.get("/ready") as response:
            assert response.status == 503
        async with one.client.get("/health") as response:
            assert response.status == 200
        one.fleet.replicas[0].ready = True
        await one.until(lambda: one.replicas.all[0].state is State.READY)
        assert (await one.complete())[0] == 200


async def test_keys_and_limits_hold_at_the_router_too() -> None:
    config = build_config(Config(), {"server": {"api_key": "k" * 24, "max_body_bytes": 2048}})

    async with routed(config=config) as one:
        assert (await one.complete())[0] == 401
        key = {"Authorization": f"Bearer {'k' * 24}"}
        assert (await one.complete(**key))[0] == 200
        assert (await one.complete("x" * 3000, **key))[0] == 413
        async with one.client.post("/replicas/replica0/drain") as response:
            assert response.status == 401


async def test_what_a_client_may_use_in_a_minute_holds_over_all_replicas() -> None:
    config = build_config(Config(), {"limits": {"requests_per_minute": 3}})

    async with routed(config=config) as one:
        assert [(await one.complete(f"{number} {LONG}"))[0] for number in range(4)] == [200, 200, 200, 429]
        assert {len(fake.bodies) for fake in one.fleet.replicas} == {1, 2}
        async with one.client.get("/health_generate") as response:
            assert response.status == 200
        async with one.client.post("/v1/messages", json={"prompt": "x"}) as response:
            answer = await response.json()
            assert (response.status, answer["type"]) == (429, "error")
            assert answer["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_are_counted_as_replicas_tell_them(is_stream: bool) -> None:
    config = build_config(Config(), {"limits": {"tokens_per_minute": 4 if is_stream else 12}})

    async with routed(config=config) as one:
        for fake in one.fleet.replicas:
            fake.behaviour = "stream" if is_stream else "answer"
        body = {"prompt": "x", "stream": is_stream}
        async with one.client.post("/v1/completions", json=body) as response:
            assert USAGE_HEADER not in response.headers
            assert response.status == 200
            await response.read()
        async with one.client.post("/v1/completions", json=body) as response:
            assert response.status == 429
            assert "tokens per minute" in (await response.json())["error"]["message"]


async def test_tokens_are_taken_when_a_request_is_sent_on_and_who_leaves_pays_the_prompt() -> None:
    config = build_config(Config(), {"limits": {"tokens_per_minute": 400}})

    async with routed(config=config) as one:
        for fake in one.fleet.replicas:
            fake.hold.clear()
        asking = asyncio.create_task(one.complete(LONG))  # about 450 tokens
        await one.until(lambda: any(fake.bodies for fake in one.fleet.replicas))
        async with asyncio.timeout(far(10)):
            assert (await one.complete())[0] == 429
        asking.cancel()
        await one.until(lambda: sum(fake.num_left for fake in one.fleet.replicas) == 1)
        assert (await one.complete())[0] == 429


async def test_what_every_replica_refuses_costs_no_tokens() -> None:
    config = build_config(Config(), {"limits": {"tokens_per_minute": 400}})

    async with routed(config=config) as one:
        for fake in one.fleet.replicas:
            fake.behaviour = "full"
        assert "error" in (await one.complete(LONG))[1]
        for fake in one.fleet.replicas:
            fake.behaviour = "answer"
        assert (await one.complete())[0] == 200


@pytest.mark.parametrize(
    "path", ["/x/../v1/completions", "/./v1/completions", "/v1/%2e/completions", "http://h/v1/..%2Fv1/completions"]
)
async def test_a_path_that_a_replica_would_read_otherwise_is_refused(path: str) -> None:
    async with routed() as one:
        reader, writer = await asyncio.open_connection(one.client._base_url.host, one.client._base_url.port)
        with closing(writer):
            writer.write(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode())
            assert b" 400 " in await reader.readline()
        assert not any(fake.seen for fake in one.fleet.replicas)


async def test_a_path_reaches_a_replica_as_it_came() -> None:
    async with routed() as one:
        path = "/v1/models/a%2Fb%20c//d?x=%2F&y"
        async with one.client.get(URL(str(one.client._base_url) + path, encoded=True)) as response:
            assert response.status == 200
        assert sum((fake.seen for fake in one.fleet.replicas), Counter()) == {path: 1}


def test_the_router_counts_what_the_application_generates_and_replicas_count_nothing() -> None:
    app = create_runner(ServerSection(), LimitsSection(), LiveServer().backend).app
    routes = [route for route in app.router.routes() if route.method == "POST" and route.resource is not None]
    generating = {
        route.resource.canonical
        for route in routes
        if isinstance(getattr(route.handler, "__self__", None), GenerateRoute)
        or "refused" in route.handler.__qualname__
    }
    assert generating == {path for one in declared(all_parts()) if one.generates for path in one.paths}


async def test_what_is_nested_too_deep_is_the_replicas_to_refuse() -> None:
    async with routed() as one:
        body = b'{"prompt": %b}' % (b"[" * 100_000 + b"]" * 100_000)
        headers = {"Content-Type": "application/json"}
        async with one.client.post("/v1/completions", data=body, headers=headers) as response:
            assert response.status == 200  # this replica answers everything
        assert sum(fake.bodies == [body] for fake in one.fleet.replicas) == 1


async def test_a_header_that_is_no_text_names_no_session() -> None:
    async with routed() as one:
        reader, writer = await asyncio.open_connection(one.client._base_url.host, one.client._base_url.port)
        body = b'{"prompt": "x"}'
        with closing(writer):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            writer.write(head + b"x-session-id: \xff\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert b" 200 " in await reader.readline()


async def test_clients_do_not_speak_as_routers_do() -> None:
    """A replica would go on from output that a client names, and no token of the stream would be counted."""

    async with routed() as one:
        headers = {"Content-Type": f"{ROUTED_TYPE.upper()}; charset=utf-8"}
        for path in ("/v1/completions", "/tokenize"):
            async with one.client.post(
                path, data=b"".join(Passage(b'{"stream": true}').pieces()), headers=headers
            ) as response:
                assert response.status == 415
        assert not any(fake.bodies for fake in one.fleet.replicas)


async def ask(one: Routed, path: str, status: int = 202, **headers: str) -> dict:
    async with one.client.post(path, headers=headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_replica_that_drains_or_has_stopped_comes_back() -> None:
    async with routed() as one:
        first = one.replicas.all[0]
        one.fleet.replicas[0].hold.clear()
        asking = [asyncio.create_task(one.complete(f"{number} {LONG}")) for number in range(2)]
        await one.until(lambda: first.num_open == 1)
        assert (await ask(one, "/replicas/replica0/drain"))["state"] == "draining"
        await one.until(lambda: first.state is State.DRAINING)
        await ask(one, "/replicas/replica0/undrain")
        await one.until(lambda: first.state is State.READY)
        assert one.fleet.stopped == []
        one.fleet.replicas[0].hold.set()
        await asyncio.gather(*asking)
        await ask(one, "/replicas/replica0/drain")
        await one.until(lambda: first.state is State.STOPPED)
        await ask(one, "/replicas/replica0/undrain")
        await one.until(lambda: first.state is State.READY)
        assert (one.fleet.stopped, one.fleet.started) == ([0], [0])


async def test_a_restart_that_fails_is_logged_and_one_of_a_router_that_ends_starts_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed() as one:

        async def refuse(number: int) -> None:
            raise OSError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(one.fleet, "start", refuse)
            await ask(one, "/replicas/replica0/restart")
            await one.until(lambda: "has failed" in caplog.text)
        assert one.replicas.all[0].state is State.STOPPED
        one.replicas.is_leaving = True
        await ask(one, "/replicas/replica0/undrain")
        assert one.fleet.started == []


async def test_pages_of_other_sites_restart_nothing() -> None:
    async with routed() as one:
        for path in ("/replicas/restart", *(f"/replicas/replica0/{what}" for what in ("drain", "undrain", "restart"))):
            error = (await ask(one, path, 403, **{"Sec-Fetch-Site": "cross-site"}))["error"]
            assert error["code"] == "foreign_page"
        assert one.fleet.stopped == []


async def test_a_rolling_restart_ends_at_a_replica_that_cannot_be_started(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed() as one:

        async def gone(number: int) -> str:
            raise OSError("no room")

        monkeypatch.setattr(one.fleet, "url", gone)
        await ask(one, "/replicas/restart")
        await one.until(lambda: "has failed" in caplog.text)
        assert [replica.state for replica in one.replicas.all] == [State.STOPPED, State.READY]
        assert one.fleet.stopped == [0]
        monkeypatch.undo()
        await ask(one, "/replicas/replica0/undrain")
        await one.until(lambda: one.replicas.all[0].state is State.READY)


async def test_a_rolling_restart_leaves_one_ready_at_any_time() -> None:
    async with routed() as one:
        num_ready = []
        one.fleet.replicas[1].ready = False
        await one.until(lambda: one.replicas.all[1].state is State.STARTING)
        one.fleet.replicas[1].ready = True
        await one.until(lambda: one.replicas.all[1].state is State.READY)
        assert (await ask(one, "/replicas/restart"))["restarting"] == ["replica0", "replica1"]
        assert (await ask(one, "/replicas/replica1/restart", 409))["error"]["code"] == "replica_busy"

        def has_ended() -> bool:
            num_ready.append(sum(replica.state is State.READY for replica in one.replicas.all))
            return one.fleet.started == [0, 1] and num_ready[-1] == 2

        await one.until(has_ended)
        assert min(num_ready) == 1
        assert (await one.complete())[0] == 200


async def test_what_a_drained_replica_does_not_finish_in_time_is_finished_by_another_one() -> None:
    config = build_config(Config(), {"server": {"drain_timeout_s": 0.05}})

    async with routed(config=config) as one:
        one.fleet.replicas[0].hold.clear()
        asking = [asyncio.create_task(one.complete(f"{number} {LONG}")) for number in range(2)]
        await one.until(lambda: one.replicas.all[0].num_open == 1)
        await ask(one, "/replicas/replica0/drain")
        assert [(status, answer["from"]) for status, answer in await asyncio.gather(*asking)] == [(200, "fake1")] * 2


async def test_replicas_of_several_routers_outlive_one_and_what_another_router_starts_is_found() -> None:
    async with routed(new_fleet=FakeLastingFleet) as one:
        fleet, replica = one.fleet, one.replicas.all[0]
        assert isinstance(fleet, FakeLastingFleet)
        await one.replicas.leave(replica)
        assert (fleet.stopped, replica.state) == ([], State.READY)
        await one.replicas.drain(replica)
        await asyncio.sleep(0.05)
        assert replica.state is State.STOPPED, "nothing has started it"
        fleet.replicas[0].url = ""
        fleet.running.add(0)
        await one.until(lambda: replica.state is State.READY)
        assert fleet.started == [], "this router has not"


async def test_a_router_goes_on_watching_when_a_cluster_cannot_be_asked() -> None:
    class Unreachable(FakeLastingFleet):
        """It can be asked once a replica is running again."""

        async def is_running(self, number: int) -> bool:
            if not self.running:
                raise RuntimeError("the cluster does not answer")
            return number in self.running

    async with routed(new_fleet=Unreachable) as one:
        fleet, replica = one.fleet, one.replicas.all[0]
        assert isinstance(fleet, Unreachable)
        await one.replicas.drain(replica)
        await asyncio.sleep(0.05)
        assert replica.state is State.STOPPED
        fleet.replicas[0].url = ""
        fleet.running.add(0)
        await one.until(lambda: replica.state is State.READY)


async def test_routers_that_share_a_port_answer_alone_at_their_own() -> None:
    async with AsyncExitStack() as stack:
        shared = [stack.enter_context(bind("127.0.0.1", 0, is_shared=True))]
        port = shared[0].getsockname()[1]
        shared.append(stack.enter_context(bind("127.0.0.1", port, is_shared=True)))
        fleet, clients = FakeFleet(2), []
        for listener in shared:
            own = stack.enter_context(bind("127.0.0.1", 0))
            replicas = await stack.enter_async_context(routing(Config(), fleet, listener, more=(own,)))
            url = f"http://127.0.0.1:{own.getsockname()[1]}"
            client = await stack.enter_async_context(aiohttp.ClientSession(url, headers=as_operator()))
            clients.append(client)
            one = Routed(fleet, replicas, client)
            await one.until(lambda: all(replica.state is State.READY for replica in one.replicas.all))  # noqa: B023
        for _ in range(3):
            assert (await one.complete())[0] == 200
        counts = [(await (await client.get("/replicas")).json())["requests"] for client in clients]
        assert counts == [0, 3]
        for fake in fleet.replicas:
            await fake.stop()
