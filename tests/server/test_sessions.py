"""Sessions: the fields that name them, and GET /sessions."""

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from engine.features.sessions.planner import session_part
from engine.types.prompt import RequestPart
from server.extensions.sessions import route
from server.extensions.sessions.extension import EXTENSION
from tests.server.engine_server import EngineServer
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]


def named(live: LiveServer, path: str, **fields: Any) -> RequestPart | None:
    given = {"input": "hi"} if path == "/v1/responses" else {"messages": MESSAGES}
    if path == "/v1/messages":
        given["max_tokens"] = 5  # type: ignore[assignment]
    reply = ask(live.port, "POST", path, {"model": MODEL, **given, **fields})
    assert reply.status == 200, reply.body
    return live.call(lambda: live.ingress.asked[-1][2].parts.get("sessions"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_request_names_its_session(live: LiveServer, path: str) -> None:
    assert named(live, path) is None
    assert named(live, path, prompt_cache_key="k") == session_part("k")
    assert named(live, path, session_id="s", prompt_cache_key="k", prompt_cache_ttl_s=90) == session_part("s", 90.0)


def test_a_header_names_the_session_if_no_field_does(live: LiveServer) -> None:
    def of(headers: dict[str, str], **fields: Any) -> RequestPart | None:
        body = {"model": MODEL, "messages": MESSAGES, **fields}
        assert ask(live.port, "POST", "/v1/chat/completions", body, headers).status == 200
        return live.call(lambda: live.ingress.asked[-1][2].parts.get("sessions"))

    assert of({"session_id": "s"}) == of({"x-session-id": "s"}) == session_part("s")
    assert of({"session_id": "s"}, prompt_cache_key="k") == session_part("k")
    assert of({"session_id": "two words"}) is None


def test_anthropics_clients_name_it_as_user_and_ask_for_a_time_in_blocks(live: LiveServer) -> None:
    path, user = "/v1/messages", {"metadata": {"user_id": "user_1_session_2"}}
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    hour = {**block, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert named(live, path) is None
    assert named(live, path, **user, system=[block]) == session_part("user_1_session_2")
    assert named(live, path, **user, system=[block, hour]) == session_part("user_1_session_2", 3600.0)
    said = {"role": "user", "content": [{**block, "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}
    assert named(live, path, **user, messages=[said]) == session_part("user_1_session_2", 300.0)


def test_sessions_say_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "MOST_AT_ONCE", 1)
    served = EngineServer(model={"name": "demo"}, plugins={"eviction": "lease"}, kv={"num_pages": 256})
    EXTENSION.with_engine(served.system)
    with served:
        text = "def add(a, b):\n    return a + b\n" * 4
        for name in ("s", "s", "t"):
            body = {"model": "demo", "prompt": text, "max_tokens": 4, "session_id": name}
            assert ask(served.port, "POST", "/v1/completions", body).status == 200
        told = ask(served.port, "GET", "/sessions").json["sessions"]
        assert [one["name"] for one in told] == ["t", "s"]
        t, s = told
        assert (s["num_requests"], s["num_open"], t["num_requests"]) == (2, 0, 1)
        assert 0 < s["cached_tokens"] < s["prompt_tokens"]
        page = served.config.kv.page_size
        assert s["leased_pages"] == t["leased_pages"] == (t["prompt_tokens"] + 3) // page, (
            "each has a lease on all of it"
        )
        assert 0 < s["lease_s"] <= 60.0
        assert (
            ask(served.port, "POST", "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1}).status == 200
        )
        assert len(ask(served.port, "GET", "/sessions").json["sessions"]) == 2


def test_usage_says_what_a_turn_has_found_in_the_cache_and_put_there() -> None:
    page, said = 8, "what does this function do, and what would you call it?"
    with EngineServer(model={"name": "demo"}, kv={"num_pages": 256, "page_size": page}) as served:
        body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": said}]}
        turns = [ask(served.port, "POST", "/v1/messages", body).json["usage"] for _ in range(2)]
        brief = {**body, "stream": True, "system": "Be brief."}
        streamed = ask(served.port, "POST", "/v1/messages", brief).body.decode()
        counted = ask(served.port, "POST", "/v1/messages/count_tokens", {"model": "demo", "messages": body["messages"]})
    (total,) = counted.json.values()
    whole = total // page * page
    first, second = turns
    assert (first["input_tokens"], first["cache_creation_input_tokens"]) == (total - whole, whole)
    assert first["cache_read_input_tokens"] == second["cache_creation_input_tokens"] == 0
    assert (second["input_tokens"], second["cache_read_input_tokens"]) == (total - whole, whole)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    started, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert {**started, "output_tokens": 1} == {**ended, "output_tokens": 1}
    assert started["cache_creation_input_tokens"] > 0
    assert started["cache_creation_input_tokens"] % page == 0


def test_a_client_sees_its_own_sessions_and_an_operator_all() -> None:
    operator = "operator-of-sixteen-characters"
    keys = {"one": "one-of-sixteen-characters", "two": "two-of-sixteen-characters"}
    server = {"api_key": list(keys.values()), "operator_key": operator}
    with EngineServer(model={"name": "demo"}, server=server) as served:
        for name, key in keys.items():
            body = {"model": "demo", "prompt": "x", "max_tokens": 1, "session_id": name}
            headers = {"Authorization": f"Bearer {key}"}
            assert ask(served.port, "POST", "/v1/completions", body, headers).status == 200
            reply = ask(served.port, "GET", "/sessions", None, headers)
            assert [one["name"] for one in reply.json["sessions"]] == [name]
        reply = ask(served.port, "GET", "/sessions", None, {"Authorization": f"Bearer {operator}"})
        assert {one["name"] for one in reply.json["sessions"]} == {"one", "two"}


def test_without_keys_a_client_sees_those_of_its_address() -> None:
    def asked(port: int, address: str, method: str, path: str, body: Any = None) -> Any:
        with closing(HTTPConnection("127.0.0.1", port, source_address=(address, 0))) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200
            return json.loads(reply.read())

    with EngineServer(model={"name": "demo"}) as served:
        for name, address in (("one", "127.0.0.1"), ("two", "127.0.0.2")):
            body = {"model": "demo", "prompt": "x", "max_tokens": 1, "session_id": name}
            asked(served.port, address, "POST", "/v1/completions", body)
            told = asked(served.port, address, "GET", "/sessions")["sessions"]
            assert [one["name"] for one in told] == [name]


def test_the_first_token_that_breaks_a_sessions_prefix_is_explained() -> None:
    user, tool = {"role": "user", "content": "def add(a, b):"}, {"type": "function", "function": {"name": "look"}}
    headers = {"Authorization": "Bearer one-of-sixteen-characters"}
    server = {"api_key": "one-of-sixteen-characters"}
    with EngineServer(model={"name": "demo"}, kv={"num_pages": 256}, server=server) as served:

        def turn(name: str, messages: list[Any], **fields: Any) -> tuple[str, Any]:
            body = {"model": "demo", "messages": messages, "max_tokens": 12, "session_id": "s", **fields}
            reply = ask(served.port, "POST", "/v1/chat/completions", body, {"X-Request-Id": name, **headers})
            assert reply.status == 200, reply.body
            difference = ask(served.port, "GET", f"/explain/{name}", None, headers).json["difference"]
            return reply.json["choices"][0]["message"]["content"], difference

        system = {"role": "system", "content": "Be brief."}
        answer, difference = turn("first", [system, user], ignore_eos=True)
        assert difference is None
        _, difference = turn("spaces", [system, user, {"role": "assistant", "content": f"  {answer}"}, user])
        assert (difference["id"], difference["causes"]) == ("first", ["spaces"])
        assert difference["shared"].endswith("assistant")
        assert difference["was"].strip().startswith(answer[:5])
        _, difference = turn("system", [{"role": "system", "content": "Be long."}, user])
        assert (difference["causes"], difference["shared"][-2:]) == (["system"], "Be")
        _, difference = turn("tools", [system, user], tools=[tool])
        assert difference["causes"] == ["tools"]


def test_texts_of_a_session_are_shown_to_its_key_alone() -> None:
    """Without keys all clients of a proxy have one address, so a session's name leads to what another one said."""
    operator = {"Authorization": "Bearer operator-of-sixteen-characters"}
    with EngineServer(model={"name": "demo"}, server={"operator_key": "operator-of-sixteen-characters"}) as served:

        def turn(name: str, text: str, headers: dict[str, str]) -> Any:
            body = {"model": "demo", "prompt": text, "max_tokens": 1, "session_id": "s"}
            reply = ask(served.port, "POST", "/v1/completions", body, {"X-Request-Id": name, **headers})
            assert reply.status == 200, reply.body
            return ask(served.port, "GET", f"/explain/{name}", None, headers).json["difference"]

        assert turn("first", "The code is 4711, and no other", {}) is None
        difference = turn("second", "The code is?", {})
        assert (difference["id"], difference["position"] > 0) == ("first", True)
        assert (difference["shared"], difference["was"], difference["now"]) == ("", "", "")
        assert ask(served.port, "GET", "/explain/second", None, operator).json["difference"]["was"] == ""
