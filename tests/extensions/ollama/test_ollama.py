"""Ollama's API: bodies, lines and errors as its clients send and read them."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.checkpoints.use import GENERATING
from engine.types.prompt import ChatTurn, ToolCall
from tests.server.engine_server import EngineServer
from tests.server.http_client import Reply, ask
from tests.server.live_server import CARD, MODEL, LiveServer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer() as live:
        yield live


def post(live: LiveServer, path: str, **fields: Any) -> Reply:
    return ask(live.port, "POST", f"/api/{path}", {"model": MODEL, **fields})


def lines(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    *whole, rest = reply.body.decode().split("\n")
    assert rest == ""
    return [json.loads(line) for line in whole]


def asked(live: LiveServer) -> Any:
    return live.call(lambda: live.ingress.asked[-1])


def test_a_stream_is_the_default_and_adds_up_to_the_whole(live: LiveServer) -> None:
    whole = post(live, "chat", messages=HI, stream=False, options={"seed": 1}).json
    *parts, last = lines(post(live, "chat", messages=HI, options={"seed": 1}))
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] != ""
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    for name in ("prompt_eval_count", "eval_count", "done_reason"):
        assert last[name] == whole[name]
    assert whole["model"] == MODEL
    assert whole["total_duration"] >= whole["eval_duration"] >= 0


def test_options_are_sampling_parameters(live: LiveServer) -> None:
    options = {
        "num_predict": 5, "seed": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1,
        "stop": ["x"], "num_ctx": 4096, "num_gpu": 1,
    }  # fmt: skip
    answer = post(live, "chat", messages=HI, stream=False, options=options).json
    params = asked(live)[1]
    assert (params.max_tokens, params.seed, params.temperature, params.top_k) == (5, 3, 0.5, 7)
    assert (params.top_p, params.min_p, params.repetition_penalty, params.stop) == (0.9, 0.1, 1.1, ("x",))
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 5)
    assert post(live, "chat", messages=HI, stream=False, options={"num_predict": -1}).json["done_reason"] == "stop"


def test_calls_are_objects_and_their_answers_find_them(live: LiveServer) -> None:
    *_, last = lines(post(live, "chat", messages=[{"role": "user", "content": "!call"}], tools=[TOOL]))
    (call,) = last["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "look", "arguments": {"at": "δ", "n": [1, 2]}}
    bare = [{"function": {"name": "look", "arguments": {"at": 1}}}, {"function": {"name": "see"}}]
    turns = [
        *HI,
        {"role": "assistant", "tool_calls": bare},
        {"role": "tool", "tool_name": "see", "content": "dark"},
        {"role": "tool", "tool_name": "look", "content": "light"},
    ]
    assert post(live, "chat", messages=turns, tools=[TOOL], stream=False).status == 200
    _, calls, dark, light = asked(live)[0]
    assert calls.tool_calls == (ToolCall("call_1_0", "look", '{"at":1}'), ToolCall("call_1_1", "see", "{}"))
    assert (dark.tool_call_id, light.tool_call_id) == ("call_1_1", "call_1_0")


def test_thoughts_come_apart(live: LiveServer) -> None:
    answer = post(live, "chat", messages=[{"role": "user", "content": "!think"}], think=False, stream=False).json
    assert answer["message"]["thinking"]
    assert asked(live)[2].chat.split_reasoning


def test_a_format_is_a_grammar(live: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    post(live, "chat", messages=HI, format=schema, stream=False)
    grammar = asked(live)[1].grammar
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)
    post(live, "generate", prompt="hi", format="json", stream=False)
    assert asked(live)[1].grammar.kind == "json_object"
    post(live, "generate", prompt="hi", format="", stream=False)
    assert asked(live)[1].grammar is None


def test_a_prompt_is_a_conversation_unless_it_is_raw(live: LiveServer) -> None:
    *parts, last = lines(post(live, "generate", prompt="hi", system="be"))
    assert asked(live)[0] == (ChatTurn("system", "be"), ChatTurn("user", "hi"))
    assert "".join(part["response"] for part in parts)
    assert (last["response"], last["done"]) == ("", True)
    assert post(live, "generate", prompt="hi", raw=True, stream=False).json["response"]
    assert asked(live)[0] == "hi"


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_request_without_a_prompt_loads_the_model_which_is_loaded(live: LiveServer, path: str) -> None:
    answer = post(live, path, stream=False, keep_alive="5m").json
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    refused = post(live, path, stream=False, keep_alive=0)
    assert (refused.status, "keep_alive" in refused.json["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "messages[0].images"),
        ("chat", {"messages": HI, "options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"messages": HI, "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": HI, "format": "yaml"}, "format"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ("generate", {"prompt": "a", "images": ["AAAA"]}, "images"),
        ("generate", {"prompt": "a", "context": [1]}, "context"),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("pull", {}, "model.path"),
    ],
)
def test_what_cannot_be_done_is_an_error_in_this_api_s_form(
    live: LiveServer, path: str, fields: dict[str, Any], named: str
) -> None:
    reply = post(live, path, **fields)
    assert reply.status == 400
    assert named in reply.json["error"]


def test_a_picture_in_an_answered_turn_does_not_end_a_conversation(live: LiveServer) -> None:
    past = {"role": "user", "content": "look", "images": ["AAAA"]}
    turns = [past, {"role": "assistant", "content": "yes"}, *HI]
    assert post(live, "chat", messages=turns, stream=False).status == 200
    assert "image left out" in asked(live)[0][0].content


def test_a_failure_within_a_stream_is_its_last_line(live: LiveServer) -> None:
    *_, last = lines(post(live, "generate", prompt="!fail", raw=True))
    assert set(last) == {"error"}


def test_the_served_model_is_listed_and_shown_with_a_tag_or_without(live: LiveServer) -> None:
    (listed,) = ask(live.port, "GET", "/api/tags").json["models"]
    assert listed["name"] == f"{MODEL}:latest"
    assert ask(live.port, "GET", "/api/ps").json["models"][0]["context_length"] == 1024
    assert ask(live.port, "GET", "/api/version").json["version"]
    for name in (MODEL, listed["name"]):
        shown = ask(live.port, "POST", "/api/show", {"model": name}).json
        assert "completion" in shown["capabilities"]
        assert post(live, "chat", messages=HI, stream=False, **{"model": name}).status == 200
    missing = ask(live.port, "POST", "/api/show", {"model": "other"})
    assert (missing.status, "other" in missing.json["error"]) == (404, True)


def test_a_model_without_vectors_says_so() -> None:
    with LiveServer(card=msgspec.structs.replace(CARD, use=GENERATING)) as live:
        refused = post(live, "embed", input="a")
    assert (refused.status, "no embeddings" in refused.json["error"]) == (400, True)


def test_texts_become_vectors() -> None:
    with EngineServer(model={"name": "demo"}, kv={"num_pages": 64}) as server:

        def embed(path: str, **fields: Any) -> Any:
            return ask(server.port, "POST", f"/api/{path}", {"model": "demo:latest", **fields}).json

        both, one = embed("embed", input=["a", "b"]), embed("embed", input="a")
        assert len(both["embeddings"]) == 2
        assert both["prompt_eval_count"] > one["prompt_eval_count"] > 0
        assert one["embeddings"][0] == pytest.approx(both["embeddings"][0], abs=1e-5)
        assert embed("embeddings", prompt="a")["embedding"] == pytest.approx(one["embeddings"][0], abs=1e-5)
