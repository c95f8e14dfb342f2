"""The server of several models over engines that are fakes of this process: which model gets what, and what is said."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from engine.config import Config, build_config
from engine.settings.sections import LimitsSection, ServerSection
from server.backend import Backend
from server.extensions.models import front
from server.extensions.models.configuration import ServedModel, SeveralModels
from server.extensions.models.models import Models
from server.extensions.models.routes import ModelsRoutes
from server.extensions.models.settings import ModelTable
from server.http.connection import HttpRunner
from server.http.listener import bind, url_of
from server.proxy.replica import State
from server.run.app import create_runner
from tests.extensions.models.fake_model import FakeModel
from tests.pace import far
from tests.server.fake_ingress import FakeIngress
from tests.server.fake_monitor import FakeMonitor
from tests.server.http_client import as_operator
from tests.server.live_server import CARD


class ServedFake(FakeModel):
    """One that listens while it is loaded, as its process would."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served.table.name, load=served.table.load)
        self.ingress = FakeIngress()
        self._served = served
        self._runner: HttpRunner | None = None

    async def listen(self) -> None:
        self.card = msgspec.structs.replace(CARD, name=self.name)
        listener, server = bind("127.0.0.1", 0), self._served.config.server
        self.url = url_of(listener)
        backend = Backend(self.ingress, FakeMonitor(self.ingress), self.card)
        self._runner = create_runner(server, LimitsSection(), backend)
        await self._runner.listen(listener)

    async def unloaded(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await super().unloaded()


class Front:
    """A front that listens, with models a (of the start) and b (on demand), and a client."""

    def __init__(self, routes: ModelsRoutes, models: Models, client: aiohttp.ClientSession) -> None:
        self.routes = routes
        self.models = models
        self.client = client

    def model(self, name: str) -> ServedFake:
        found = self.models.find(name)
        assert isinstance(found, ServedFake)
        return found

    async def post(self, body: object, path: str = "/v1/completions", **headers: str) -> tuple[int, dict]:
        async with self.client.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict]:
        async with self.client.get(path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def fronted(monkeypatch: pytest.MonkeyPatch, **sections: dict) -> AsyncIterator[Front]:
    """sections: configuration tables."""
    monkeypatch.setattr(front, "ModelReplica", ServedFake)
    base = build_config(Config(), sections)
    tables = (ModelTable(name="a"), ModelTable(name="b", load="demand"))
    config = SeveralModels(**msgspec.structs.asdict(base), models=tuple(ServedModel(one, base) for one in tables))
    with bind("127.0.0.1", 0) as listener:
        url = url_of(listener)
        async with (
            asyncio.timeout(far(20)),
            front.fronting(config, listener) as (routes, models),
            aiohttp.ClientSession(url, headers=as_operator()) as client,
        ):
            await front.start(routes, models)
            yield Front(routes, models, client)
            assert models.num_open == 0


async def test_a_request_goes_to_the_model_it_names_or_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        for name in ("b", "a"):
            status, answer = await one.post({"model": name, "prompt": "p"})
            assert (status, answer["model"]) == (200, name)
        assert [len(one.model(name).ingress.asked) for name in "ab"] == [1, 1]
        for query, num_asked in (("", [2, 1]), ("?model=b", [2, 2])):
            assert (await one.post({"text": "p"}, f"/generate{query}"))[0] == 200
            assert [len(one.model(name).ingress.asked) for name in "ab"] == num_asked
        status, answer = await one.post({"model": "b", "messages": [{"role": "user", "content": "p"}]}, "/v1/messages")
        assert (status, answer["type"]) == (400, "error")  # no max_tokens, told in the form of that route


@pytest.mark.parametrize(
    "body, code",
    [({"model": "x", "prompt": "p"}, "model_not_found"), ({"model": 3}, "invalid_value"), ([1], "invalid_value")],
)
async def test_what_names_no_model_is_refused_and_loads_none(
    monkeypatch: pytest.MonkeyPatch, body: object, code: str
) -> None:
    async with fronted(monkeypatch) as one:
        status, answer = await one.post(body)
        assert (status, answer["error"]["code"]) == (404 if code == "model_not_found" else 400, code)
        json_type = {"Content-Type": "application/json"}
        async with one.client.post("/v1/completions", data=b"{", headers=json_type) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "malformed_json")
        assert one.model("b").began == []


async def test_what_a_page_of_another_site_can_send_unasked_loads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        for headers, body, status in (
            ({"Content-Type": "text/plain"}, b'{"model": "b"}', 415),
            ({"Content-Encoding": "gzip", "Content-Type": "application/json"}, b"", 403),
            ({}, b"", 403),
        ):
            headers["Sec-Fetch-Site"] = "cross-site"
            async with one.client.post("/v1/completions?model=b", data=body, headers=headers) as response:
                assert response.status == status
        assert one.model("b").began == []


async def test_all_models_are_listed_with_whether_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        _, answer = await one.get("/v1/models")
        assert [(model["id"], model["loaded"]) for model in answer["data"]] == [("a", True), ("b", False)]
        assert answer["data"][0]["max_model_len"] == CARD.max_model_len
        assert "max_model_len" not in answer["data"][1]
        assert (await one.get("/v1/models/b"))[1]["loaded"] is False
        assert (await one.get("/v1/models/c"))[0] == 404
        assert (await one.get("/health"))[1] == {"status": "ok", "models": {"a": "ready", "b": "stopped"}}
        assert (await one.get("/ready"))[0] == 200


async def test_settings_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        for path in ("/apply", "/sleep", "/wake_up"):
            status, answer = await one.post({}, path)
            assert (status, answer["error"]["code"]) == (404, "operations_off")
        assert (await one.get("/is_sleeping"))[1]["error"]["code"] == "operations_off"
        assert (await one.get("/v1/streams/x"))[1]["error"]["code"] == "stream_not_found"


async def test_who_looks_loads_nothing_and_sees_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        for path in ("/stats", "/server_info", "/health_generate"):
            status, answer = await one.get(f"{path}?model=b")
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
            assert (await one.get(path))[0] == 200  # of the first that is loaded
        assert one.model("b").began == []
        await one.post({"model": "b", "prompt": "p"})
        assert (await one.get("/stats?model=b"))[1]["model"] == "b"
        async with one.client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        assert 'callboard_models_loaded{model="b"} 1.0' in lines
        assert any('model="b"' in line and not line.startswith("callboard_models_") for line in lines)
        assert (await one.get("/load"))[0] == 200


@pytest.mark.parametrize(
    "limit, code", [("max_requests", "queue_full"), ("max_requests_per_client", "client_queue_full")]
)
async def test_requests_are_counted_over_all_models_together(
    monkeypatch: pytest.MonkeyPatch, limit: str, code: str
) -> None:
    async with fronted(monkeypatch, limits={limit: 1}) as one:
        one.model("b").gate.clear()
        waiting = asyncio.create_task(one.post({"model": "b", "prompt": "p"}))
        while not one.models.num_open:
            await asyncio.sleep(0.005)
        status, answer = await one.post({"model": "a", "prompt": "p"})
        assert (status, answer["error"]["code"]) == (429, code)
        one.model("b").gate.set()
        assert (await waiting)[0] == 200
        assert (await one.post({"model": "a", "prompt": "p"}))[0] == 200


async def test_a_minute_is_counted_over_all_models_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch, limits={"requests_per_minute": 1}) as one:
        assert (await one.post({"model": "a", "prompt": "p"}))[0] == 200
        assert (await one.post({"model": "b", "prompt": "p"}))[1]["error"]["code"] == "rate_limit_exceeded"


async def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        one.model("b").gate.clear()
        waiting = asyncio.create_task(one.post({"model": "b", "prompt": "p"}))
        while not one.model("b").num_wanted:
            await asyncio.sleep(0.005)
        waiting.cancel()
        while one.model("b").num_wanted or one.models.num_open:
            await asyncio.sleep(0.005)
        one.model("b").gate.set()
        while one.model("b").state is not State.READY:
            await asyncio.sleep(0.005)
        assert one.model("b").ingress.asked == []


async def test_a_load_that_lasts_longer_than_a_first_token_may_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch, limits={"first_token_timeout_s": 0.02}) as one:
        one.model("b").gate.clear()
        async with one.client.post("/v1/completions", json={"model": "b", "prompt": "p"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
            assert (await response.json())["error"]["code"] == "model_not_loaded"


async def test_keys_hold_for_the_front_and_for_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch, server=msgspec.to_builtins(ServerSection(api_key="k" * 16))) as one:
        assert (await one.get("/health"))[0] == 200
        for path in ("/v1/models", "/stats", "/metrics"):
            assert (await one.get(path))[0] == 401
        assert (await one.post({"model": "b", "prompt": "p"}))[0] == 401
        assert one.model("b").began == []
        assert (await one.post({"model": "b", "prompt": "p"}, Authorization="Bearer " + "k" * 16))[0] == 200
        async with one.client.post(one.model("b").url + "/v1/completions", json={"prompt": "p"}) as response:
            assert response.status == 401


async def test_a_draining_front_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        one.routes.is_leaving = True
        status, answer = await one.post({"model": "a", "prompt": "p"})
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert (await one.get("/ready"))[0] == 503


async def test_aborts_reach_every_model_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as one:
        hanging = asyncio.create_task(one.post({"model": "b", "prompt": "!hang"}, **{"X-Request-Id": "mine"}))
        while not one.model("b").ingress.num_open:
            await asyncio.sleep(0.005)
        status, answer = await one.post({"rid": "mine"}, "/abort_request")
        assert (status, answer["num_aborted"]) == (200, 1)
        await hanging
