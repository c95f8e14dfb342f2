"""Health, readiness, version, admission states, and what the key leaves open."""

import logging
import re

import pytest

from engine.actors.snapshot import Snapshot
from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

COMPLETION = {"model": MODEL, "prompt": "p"}


def test_a_ready_server_shows_its_state_and_no_gauges_to_all(live: LiveServer) -> None:
    reply = ask(live.port, "GET", "/health")
    assert (reply.status, reply.json) == (200, {"status": "ok"})
    assert ask(live.port, "GET", "/ready").status == 200
    assert set(ask(live.port, "GET", "/version").json) == {"version"}


def test_what_other_servers_call_the_same(live: LiveServer) -> None:
    for method in ("GET", "POST"):
        assert ask(live.port, method, "/ping").json == ask(live.port, "GET", "/health").json
    assert ask(live.port, "GET", "/get_server_info").json == ask(live.port, "GET", "/server_info").json
    for path in ("/model_info", "/get_model_info"):
        info = ask(live.port, "GET", path).json
        assert (info["model_path"], info["is_generation"]) == (MODEL, True)


@pytest.mark.parametrize("state, code", [("loading", "not_ready"), ("draining", "draining")])
def test_a_server_that_takes_no_requests_yet_or_any_more(state: str, code: str) -> None:
    ingress = FakeIngress()
    ingress.ready, ingress.draining, ingress.stats = state != "loading", state == "draining", None
    with LiveServer(ingress) as live:
        health = ask(live.port, "GET", "/health")
        assert (health.status, health.json) == (200, {"status": state})
        for reply in (ask(live.port, "GET", "/ready"), ask(live.port, "POST", "/v1/completions", COMPLETION)):
            assert (reply.status, reply.error["code"], reply.error["type"]) == (503, code, "service_unavailable")
            assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("code", ["recovering", "stalled"])
def test_requests_are_taken_while_executors_come_back_and_ready_says_that_they_wait(code: str) -> None:
    ingress = FakeIngress()
    ingress.recovering, ingress.stalled_s = code == "recovering", 31.0
    with LiveServer(ingress) as live:
        health, ready = ask(live.port, "GET", "/health"), ask(live.port, "GET", "/ready")
        assert (health.status, health.json["status"]) == (200, "recovering" if code == "recovering" else "ok")
        assert (ready.status, ready.error["code"]) == (503, code)
        assert int(ready.headers["retry-after"]) >= 1
        assert ask(live.port, "POST", "/v1/completions", COMPLETION).status == 200


def test_a_dead_engine_shows_everywhere() -> None:
    ingress = FakeIngress()
    ingress.ready, ingress.failure = False, "executor crashed in /secret/path.py"
    with LiveServer(ingress) as live:
        for reply in (
            ask(live.port, "GET", "/health"),
            ask(live.port, "GET", "/ready"),
            ask(live.port, "POST", "/v1/completions", COMPLETION),
        ):
            assert (reply.status, reply.error["code"]) == (503, "engine_died")
            assert b"secret" not in reply.body


def test_the_key_guards_all_but_health_and_ready() -> None:
    with LiveServer(server=ServerSection(api_key="s3cret")) as live:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/version"),
            ("POST", "/v1/completions"),
            ("GET", "/nowhere"),
            ("DELETE", "/health"),
            ("GET", "/health/"),
            ("GET", "//health"),
            ("GET", "/v1/models/../../health"),
        ):
            reply = ask(live.port, method, path)
            assert (path, reply.status) == (path, 401)
            assert reply.error["type"] == "authentication_error"
            assert reply.headers["www-authenticate"] == "Bearer"
        assert ask(live.port, "GET", "/version", headers={"Authorization": "Basic s3cret"}).status == 401
        assert ask(live.port, "GET", "/version", headers={"Authorization": "Bearer \xe9"}).status == 401
        assert ask(live.port, "GET", "/version", headers={"Authorization": "bearer s3cret"}).status == 200
        assert ask(live.port, "GET", "/health").status == 200
        assert ask(live.port, "GET", "/ping").status == 200
        assert ask(live.port, "GET", "/ready").status == 200


def test_each_request_is_one_line_in_the_log(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="server"):
        ask(live.port, "POST", "/v1/completions", COMPLETION, {"X-Request-Id": "mine"})
        ask(live.port, "GET", "/no\\where")
    first, second = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"request=mine client=127.0.0.1 POST /v1/completions status=200 "
        r"duration_ms=\d+\.\d prompt_tokens=2 completion_tokens=12",
        first,
    )
    assert re.fullmatch(r"request=req-\w+ client=127.0.0.1 GET - status=404 duration_ms=\d+\.\d", second)


def test_an_engine_that_does_not_answer_is_neither_ready_nor_healthy_nor_measured() -> None:
    waited: list[float] = []

    async def look(*, patience_s: float = 1.0, **_: object) -> Snapshot:
        waited.append(patience_s)
        raise RequestError("the engine does not answer", status=503, code="engine_silent", retry_after_s=5)

    with LiveServer() as live:
        live.monitor.look = look  # type: ignore[method-assign]
        for path in ("/ready", "/health", "/metrics", "/stats", "/load", "/server_info"):
            reply = ask(live.port, "GET", path)
            assert (path, reply.status, reply.error["code"]) == (path, 503, "engine_silent")
            assert reply.headers["retry-after"] == "5"
        assert waited == [1.0, 10.0, 1.0, 1.0, 1.0, 1.0]
        assert ask(live.port, "POST", "/v1/completions", COMPLETION).status == 200


def test_loads_as_routers_read_them(live: LiveServer) -> None:
    told = ask(live.port, "GET", "/v1/loads").json
    (load,) = told["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (3, 2, 0)
    assert load["num_used_tokens"] * 5 == load["max_total_num_tokens"] > 0
    assert load["token_usage"] == told["aggregate"]["avg_token_usage"] == 0.2
    assert (told["aggregate"]["total_reqs"], told["dp_rank_count"]) == (5, 1)
