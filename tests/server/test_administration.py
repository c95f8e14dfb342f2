"""Ending requests, forgetting what is cached, asking how things stand: for operators, routers and benchmarks."""

import json
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from server.clients import Clients
from server.generate.output import FinishReason
from server.http.exchange import EXCHANGE, Exchange
from server.operators.status import ProbeRoute
from tests.server.engine_server import EngineServer
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer

ABORTED: FinishReason = "abort"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def begin(client: RawClient, path: str, key: str = "", name: str = "", **fields: Any) -> None:
    body = json.dumps({"model": MODEL, **fields}).encode()
    headers = {**bearer(key), **({"X-Request-Id": name} if name else {})}
    client.send(http_bytes("POST", path, body, headers))


def abort(live: LiveServer, key: str = "", **fields: Any) -> Reply:
    return ask(live.port, "POST", "/abort_request", fields, bearer(key))


def opened(live: LiveServer, number: int) -> None:
    assert live.wait_until(lambda: live.ingress.num_open == number, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_by_its_name_with_a_finish_that_says_so(stream: bool) -> None:
    with LiveServer() as live, RawClient(live.port) as client, RawClient(live.port) as other:
        begin(client, "/v1/completions", name="mine", prompt="!hang", n=2, stream=stream)
        begin(other, "/v1/completions", name="other", prompt="!hang")
        opened(live, 3)
        assert abort(live, rid="mine").json == {"num_aborted": 1, "unknown": []}
        reply = client.read_reply()
        assert reply.status == 200
        answers = reply.events[:-1] if stream else [reply.json]
        reasons = [choice["finish_reason"] for answer in answers for choice in answer["choices"]]
        assert reasons == [ABORTED] * 2
        opened(live, 1)
        assert abort(live, request_ids=["mine", "other"]).json == {"num_aborted": 1, "unknown": ["mine"]}
        assert other.read_reply().status == 200
        opened(live, 0)


def test_other_names_of_a_request() -> None:
    with LiveServer() as live:
        for path, fields, name in (
            ("/v1/completions", {"prompt": "!hang", "request_id": "mine"}, "mine"),
            ("/generate", {"text": "!hang", "rid": "mine"}, "mine"),
        ):
            with RawClient(live.port) as client:
                begin(client, path, **fields)
                opened(live, 1)
                assert abort(live, rid=[name]).json["num_aborted"] == 1
                assert client.read_reply().status == 200
        ingress = live.ingress
        live.call(lambda: setattr(ingress, "delay_s", 0.05))
        with RawClient(live.port) as client:
            begin(client, "/v1/completions", prompt="x", stream=True, max_tokens=1000, ignore_eos=True)
            answer = json.loads(client.read_until(b"\n\n").partition(b"data: ")[2])
            assert abort(live, rid=answer["id"]).json["num_aborted"] == 1
        opened(live, 0)


def test_every_endpoint_has_a_word_for_it() -> None:
    with LiveServer() as live, RawClient(live.port) as client:
        begin(client, "/generate", text="!hang")
        opened(live, 1)
        assert abort(live, abort_all=True).json == {"num_aborted": 1, "unknown": []}
        assert client.read_reply().json["meta_info"]["finish_reason"] == {"type": ABORTED}
        begin(client, "/v1/embeddings", input="!hang")
        opened(live, 1)
        assert abort(live, abort_all=True).json["num_aborted"] == 1
        reply = client.read_reply()
        assert (reply.status, reply.error["code"]) == (409, "aborted")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_was_aborted_is_cancelled(stream: bool) -> None:
    with LiveServer(FakeIngress(delay_s=0.02)) as live, RawClient(live.port) as client:
        begin(client, "/v1/responses", name="r", input="x", stream=stream, max_output_tokens=2000, ignore_eos=True)
        opened(live, 1)
        assert abort(live, rid="r").status == 200
        body = client.read_reply().body
        last = json.loads(body.decode().strip().rpartition("data: ")[2])
        if stream:
            assert last["type"] == "response.incomplete"
            last = last["response"]
        assert (last["status"], last["incomplete_details"]) == ("cancelled", None)


def test_tokens_that_came_before_the_end_are_counted() -> None:
    with LiveServer(FakeIngress(delay_s=0.02)) as live, RawClient(live.port) as client:
        options = {"include_usage": True}
        begin(client, "/v1/completions", name="r", prompt="x", stream=True, stream_options=options, max_tokens=500,
              ignore_eos=True, return_token_ids=True)  # fmt: skip
        assert live.wait_until(lambda: bool(live.ingress.opened) and live.ingress.opened[-1].has_output, 5)
        abort(live, rid="r")
        *chunks, last, _ = client.read_reply().events
        assert last["usage"]["completion_tokens"] == sum(len(one["choices"][0]["token_ids"]) for one in chunks) > 0


def test_a_key_reaches_only_its_own_requests() -> None:
    with LiveServer(server=ServerSection(api_key=["one", "two"])) as live, RawClient(live.port) as client:
        begin(client, "/v1/completions", "one", "mine", prompt="!hang")
        opened(live, 1)
        assert abort(live, "two", rid="mine").status == 404
        assert abort(live, "two", abort_all=True).json["num_aborted"] == 0
        assert abort(live, rid="mine").status == 401
        opened(live, 1)
        assert abort(live, "one", abort_all=True).json["num_aborted"] == 1
        assert client.read_reply().status == 200


@pytest.mark.parametrize(
    "body, status, param",
    [({}, 400, "rid"), ({"rid": ""}, 400, "rid"), ({"rid": []}, 400, "rid"), ({"rid": 1}, 400, "rid"),
     ({"rid": "nobody"}, 404, "rid"), ({"abort_all": 1}, 400, "abort_all"), ({"request_ids": "x"}, 400, "request_ids")],
)  # fmt: skip
def test_names_that_are_none_are_refused(live: LiveServer, body: dict[str, Any], status: int, param: str) -> None:
    for path in ("/abort_request", "/abort_requests"):
        reply = ask(live.port, "POST", path, body)
        assert (reply.status, reply.error["param"]) == (status, param)


# ---- the prefix cache -----------------------------------------------------------------------


def salts(live: LiveServer, *keys: str) -> list[object]:
    """Under which salts requests with these keys reach the engine."""
    for key in keys:
        body = {"model": MODEL, "prompt": "p", "cache_salt": "own"}
        assert ask(live.port, "POST", "/v1/completions", body, bearer(key)).status == 200
    return [options.cache_salt for _, _, options in live.call(lambda: live.ingress.asked[-len(keys) :])]


def reset(live: LiveServer, key: str = "", path: str = "/reset_prefix_cache") -> None:
    reply = ask(live.port, "POST", path, {}, bearer(key))
    assert (reply.status, reply.json) == (200, {"success": True})


def test_a_key_forgets_only_what_is_its_own() -> None:
    with LiveServer(server=ServerSection(api_key=["one", "two"])) as live:
        before = salts(live, "one", "two")
        reset(live, "one")
        after = salts(live, "one", "two")
        assert after[0] not in before
        assert after[1] == before[1]


@pytest.mark.parametrize("server", [{}, {"api_key": ["one", "two"], "shared_cache": True}])
def test_what_is_shared_is_forgotten_for_all(server: dict[str, Any]) -> None:
    keys = server.get("api_key", [""])
    with LiveServer(server=ServerSection(**server)) as live:
        seen = set(salts(live, *keys))
        for path in ("/reset_prefix_cache", "/flush_cache"):
            reset(live, keys[0], path)
            now = set(salts(live, *keys))
            assert len(now) == 1
            assert not now & seen
            seen |= now


BARE = b"POST /flush_cache HTTP/1.1\r\nHost: test\r\n\r\n"  # as curl -X POST sends it
CHUNKED = BARE.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")


NO_TYPE = {"Content-Type": ""}
WAYS_TO_ASK = {
    "neither body nor length nor type": BARE,
    "no body": http_bytes("POST", "/flush_cache", b"", NO_TYPE),
    "the type of JSON and no body": http_bytes("POST", "/flush_cache"),
    "an empty body in chunks": CHUNKED,
    "an object": http_bytes("POST", "/flush_cache", b"{}"),
    "what vLLM's client adds": http_bytes("POST", "/reset_prefix_cache?reset_running_requests=true", b"", NO_TYPE),
    "what SGLang's client adds": http_bytes("POST", "/flush_cache?timeout=0", b"", NO_TYPE),
}


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_it_is_reset_as_clients_ask_for_it(live: LiveServer, way: str) -> None:
    before = salts(live, "")
    with RawClient(live.port) as client:
        for _ in range(2):  # and the connection is in order for the next one
            client.send(WAYS_TO_ASK[way])
            reply = client.read_reply()
            assert (reply.status, reply.json) == (200, {"success": True})
    assert salts(live, "") != before


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_a_question_resets_nothing(live: LiveServer, method: bytes) -> None:
    before = salts(live, "")
    with RawClient(live.port) as client:
        client.send(BARE.replace(b"POST", method))
        assert client.read_until(b"\r\n").startswith(b"HTTP/1.1 401 "), "only an operator's key may"
    assert salts(live, "") == before


def test_a_web_page_of_another_site_cannot_reset_it() -> None:
    page = {"Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"}
    with LiveServer(server=ServerSection(cors_origins=["https://named.example"])) as live:
        before = salts(live, "")
        for headers in (page, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
            reply = ask(live.port, "POST", "/flush_cache", b"", headers)
            assert (reply.status, reply.error["code"]) == (403, "foreign_page")
        assert salts(live, "") == before
        for headers in ({"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin", "Origin": live.url},
                        {**page, "Origin": "https://named.example"}):  # fmt: skip
            headers["Host"] = live.url.removeprefix("http://")
            assert ask(live.port, "POST", "/flush_cache", b"", headers).status == 200


def test_nothing_that_was_cached_is_found_and_what_runs_goes_on() -> None:
    prompt = "# a prompt of some length, so that it fills several pages of the cache\n" * 3
    with EngineServer(model={"name": "demo"}) as served:

        def complete(**fields: Any) -> dict[str, Any]:
            body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
            return ask(served.port, "POST", "/v1/completions", body).json

        def cached() -> int:
            return complete()["usage"]["prompt_tokens_details"]["cached_tokens"]

        whole = complete(max_tokens=200, ignore_eos=True)["choices"][0]["text"]
        assert cached() > 16
        with RawClient(served.port) as client:
            body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 200, "ignore_eos": True}
            client.send(http_bytes("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode()))
            client.read_until(b"data: ")
            assert ask(served.port, "POST", "/reset_prefix_cache", {}).status == 200
            assert cached() == 0
            events = client.read_until(b"[DONE]").decode()
        text = "".join(json.loads(line)["choices"][0]["text"] for line in _lines(events))
        assert whole.endswith(text)
        assert cached() > 16
        health = ask(served.port, "GET", "/health_generate")
        assert (health.status, health.json) == (200, {"status": "ok"})


def test_an_engine_stops_what_is_aborted_and_keeps_nothing_of_it() -> None:
    with EngineServer(model={"name": "demo"}) as served, RawClient(served.port) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
        client.send(http_bytes("POST", "/v1/completions", json.dumps(body).encode(), {"X-Request-Id": "mine"}))
        client.read_until(b"data: ")
        assert ask(served.port, "POST", "/abort_request", {"rid": "mine"}).json == {"num_aborted": 1, "unknown": []}
        events = _lines(client.read_until(b"[DONE]").decode())
        reasons = [json.loads(line)["choices"][0]["finish_reason"] for line in events]
        assert sorted(reason for reason in reasons if reason) == [ABORTED] * 2
        assert ask(served.port, "POST", "/abort_request", {"rid": "mine"}).status == 404
        whole = {"model": "demo", "prompt": "x", "max_tokens": 4, "temperature": 0}
        assert ask(served.port, "POST", "/v1/completions", whole).json["choices"][0]["finish_reason"] == "length"
        # The pages of the aborted ones came back before those of the request after them.
        stats = ask(served.port, "GET", "/stats").json
        assert (stats["requests"]["running"], stats["requests"]["waiting"], stats["pages"]["used"]) == (0, 0, 0)


def _lines(events: str) -> list[str]:
    """The JSON of whole events, whatever chunks they came in."""
    return [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]


# ---- how things stand -----------------------------------------------------------------------


def test_a_server_says_what_it_is_and_what_it_bears(live: LiveServer) -> None:
    info = ask(live.port, "GET", "/server_info").json
    assert (info["model"], info["max_model_len"], info["vocab_size"]) == (MODEL, 1024, 1000)
    assert info["max_requests"] == LimitsSection().max_requests
    with RawClient(live.port) as client:
        begin(client, "/v1/completions", prompt="!hang", n=3)
        assert live.wait_until(lambda: live.ingress.num_open == 3, 5)
        assert ask(live.port, "GET", "/load").json["server_load"] == 3
    assert live.wait_until(lambda: live.ingress.num_open == 0, 5)


def test_the_deep_probe_asks_for_a_token() -> None:
    with LiveServer() as live:
        assert ask(live.port, "GET", "/health_generate").status == 200
        prompt, params, options = live.call(lambda: live.ingress.asked[-1])
        assert (tuple(prompt), params.max_tokens, options.priority < 0) == ((0,), 1, True)
        live.call(lambda: setattr(live.ingress, "ready", False))
        assert ask(live.port, "GET", "/health_generate").error["code"] == "not_ready"
    with LiveServer(limits=LimitsSection(max_requests=1)) as live, RawClient(live.port) as client:
        begin(client, "/v1/completions", prompt="!hang")
        opened(live, 1)
        assert ask(live.port, "GET", "/health_generate").status == 429


def test_the_deep_probe_uses_nothing_of_what_a_client_may_ask_in_a_minute() -> None:
    with LiveServer(limits=LimitsSection(requests_per_minute=1)) as live:
        for _ in range(3):
            assert ask(live.port, "GET", "/health_generate").status == 200
        body = {"model": MODEL, "prompt": "p"}
        assert [ask(live.port, "POST", "/v1/completions", body).status for _ in range(2)] == [200, 429]


async def test_the_deep_probe_does_not_wait_for_ever() -> None:
    ingress = FakeIngress(delay_s=60.0)
    request = make_mocked_request("GET", "/health_generate")
    request[EXCHANGE] = Exchange.of(request)
    clients = Clients(ingress, ServerSection(), LimitsSection())
    with pytest.raises(RequestError) as failed:
        await ProbeRoute(clients, limit_s=0.01).get(request)
    assert ingress.num_open == 0
    assert (failed.value.status, failed.value.code) == (503, "stalled")


@pytest.mark.parametrize("path", ["/server_info", "/load", "/health_generate"])
def test_they_need_the_key(path: str) -> None:
    with LiveServer(server=ServerSection(api_key="k", operator_key="o")) as live:
        assert ask(live.port, "GET", path).status == 401
        assert ask(live.port, "GET", path, headers=bearer("k")).status == 403
        assert ask(live.port, "GET", path, headers=bearer("o")).status == 200


@pytest.mark.parametrize(
    "method, path",
    [("GET", ""), ("DELETE", ""), ("POST", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("POST", "/a/b")],
)
def test_a_response_of_before_is_not_there(live: LiveServer, method: str, path: str) -> None:
    reply = ask(live.port, method, f"/v1/responses/resp_1{path}", {})
    assert (reply.status, reply.error["code"]) == (404, "response_not_found")
