"""The JSON and the event stream, field by field: what a schema check would look at."""

import json
from typing import Any

import openai.types
import openai.types.chat
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer

HEAD = {"id", "object", "created", "model", "system_fingerprint", "choices"}
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


def complete(live: LiveServer, **fields: Any) -> Reply:
    return ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": "p", **fields})


def chat(live: LiveServer, **fields: Any) -> Reply:
    messages = [{"role": "user", "content": "p"}]
    return ask(live.port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "echo": True, "n": 2, "stop": "x"}])
def test_completions_are_valid_by_openais_schema(live: LiveServer, fields: dict[str, Any]) -> None:
    # Not its events: the schema has none of their own, and every server's have a null for the finish in between.
    check(openai.types.Completion, complete(live, **fields).json)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2, "stop": "x"}])
def test_chats_are_valid_by_openais_schema(live: LiveServer, fields: dict[str, Any]) -> None:
    check(openai.types.chat.ChatCompletion, chat(live, **fields).json)
    for event in chat(live, **fields, stream=True, stream_options={"include_usage": True}).events[:-1]:
        check(openai.types.chat.ChatCompletionChunk, event)
    for model in ask(live.port, "GET", "/v1/models").json["data"]:
        check(openai.types.Model, model)


def check(schema: type[BaseModel], answer: dict[str, Any]) -> None:
    """The client's types are made from OpenAI's schema; by itself it does not look whether an answer keeps to it."""
    schema.model_validate_json(json.dumps(answer), strict=True)


def test_completion_has_exactly_these_fields(live: LiveServer) -> None:
    answer = complete(live).json
    assert set(answer) == HEAD | {"usage"}
    assert answer["object"] == "text_completion"
    assert set(answer["usage"]) == USAGE
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
    assert choice["logprobs"] is None


def test_chat_completion_has_exactly_these_fields(live: LiveServer) -> None:
    answer = chat(live).json
    assert set(answer) == HEAD | {"usage"}
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "matched_stop"}
    assert set(choice["message"]) == {"role", "content", "refusal"}


def test_a_stop_string_is_told_as_stop_reason(live: LiveServer) -> None:
    text = complete(live, max_tokens=12).json["choices"][0]["text"]
    (choice,) = complete(live, max_tokens=12, stop=["never", text[5:8]]).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[5:8])
    assert choice["matched_stop"] == text[5:8]
    assert choice["text"] == text[: text.index(text[5:8])]


def test_completion_logprobs_are_parallel_lists(live: LiveServer) -> None:
    logprobs = complete(live, logprobs=4, max_tokens=6).json["choices"][0]["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert {len(column) for column in logprobs.values()} == {6}
    offset = 0
    for start, token, top in zip(logprobs["text_offset"], logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert start == offset
        offset += len(token)
        assert token in top
        assert len(top) == 4
        assert -9999.0 in top.values()  # an infinite one; JSON has no word for it


def test_no_alternatives_still_tell_the_sampled_token(live: LiveServer) -> None:
    logprobs = complete(live, logprobs=0, max_tokens=3).json["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["top_logprobs"] == [{token: -0.25} for token in logprobs["tokens"]]


def test_chat_logprobs_carry_bytes(live: LiveServer) -> None:
    content = chat(live, logprobs=True, top_logprobs=2, max_tokens=5).json["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(token["bytes"]).decode() == token["token"]
        assert [set(top) for top in token["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2


def test_chat_logprobs_without_alternatives(live: LiveServer) -> None:
    content = chat(live, logprobs=True, max_tokens=2).json["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[], []]


def test_completion_stream_has_one_event_per_token_and_done(live: LiveServer) -> None:
    reply = complete(live, stream=True, max_tokens=7, logprobs=1)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert all(set(chunk) == HEAD for chunk in chunks)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == complete(live, max_tokens=7, logprobs=1).json["choices"][0]["logprobs"]["text_offset"]


def test_events_are_not_delayed_into_each_other(live: LiveServer) -> None:
    live.ingress.delay_s = 0.005
    try:
        *chunks, _ = complete(live, stream=True, max_tokens=7).events
    finally:
        live.ingress.delay_s = 0.0
    assert len(chunks) == 7
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["length"]


def test_chat_stream_begins_with_the_role_and_ends_with_a_reason(live: LiveServer) -> None:
    *chunks, _ = chat(live, stream=True, n=2, seed=1).events
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices][-1] == "stop"
        assert [choice["finish_reason"] for choice in choices].count("stop") == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_comes_last_and_is_null_before(live: LiveServer) -> None:
    for ask_one in (complete, chat):
        reply = ask_one(live, stream=True, stream_options={"include_usage": True})
        *chunks, last, done = reply.events
        assert done == "[DONE]"
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert set(last["usage"]) == USAGE
        assert last["usage"]["completion_tokens"] == 12


def test_usage_that_is_not_wanted_is_not_told_either_way(live: LiveServer) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    *chunks, _ = complete(live, stream=True, max_tokens=3, stream_options=options).events
    assert not any("usage" in chunk for chunk in chunks)


def test_a_response_has_all_that_the_official_type_has(live: LiveServer) -> None:
    body = {"model": MODEL, "input": "p", "max_tokens": 16}
    reply = ask(live.port, "POST", "/v1/responses", body)
    response = Response.model_validate_json(reply.body, strict=True)
    assert response.max_output_tokens == 16
    assert response.usage is not None
    assert response.usage.input_tokens_details.cache_write_tokens == 0


def test_continuous_usage_is_told_once_it_is_known(live: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = complete(live, stream=True, stream_options=options).events
    assert chunks[-1]["usage"] == last["usage"]


def test_no_text_can_end_an_event_early(live: LiveServer) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    events = complete(live, prompt=prompts, stream=True).events
    texts = [""] * 40
    for chunk in events[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in complete(live, prompt=prompts).json["choices"]]
    assert any("data: [DONE]\n\n" in text for text in texts)


def test_failure_inside_a_stream_is_an_error_event_and_done(live: LiveServer) -> None:
    *chunks, error, done = complete(live, prompt="!fail", stream=True).events
    assert chunks
    assert done == "[DONE]"
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "numerical_error")


def test_a_request_that_took_too_long_is_not_to_be_repeated(live: LiveServer) -> None:
    reply = complete(live, prompt="!timeout")
    assert (reply.status, reply.error["code"], reply.error["type"]) == (504, "request_timeout", "server_error")
    assert reply.headers["x-should-retry"] == "false"


def test_models_have_their_context_length(live: LiveServer) -> None:
    body = ask(live.port, "GET", "/v1/models").json
    assert body["object"] == "list"
    model = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "callboard", "max_model_len": 1024}
    model |= {"root": MODEL, "parent": None, "kind": "generate"}
    model |= {"type": "model", "display_name": MODEL, "created_at": "2023-11-14T22:13:20Z"}  # as Anthropic has it
    assert body["data"] == [model]
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, MODEL, MODEL)
    assert ask(live.port, "GET", f"/v1/models/{MODEL}").json == model


def test_request_ids_are_the_clients_own_or_made_up(live: LiveServer) -> None:
    def echoed(sent: str) -> str:
        return ask(live.port, "GET", "/health", headers={"X-Request-Id": sent}).headers["x-request-id"]

    assert echoed("client-42-a") == "client-42-a"
    assert echoed("x" * 128) == "x" * 128
    for unusable in ("x" * 129, "\xe9", "", "client-42 a"):
        assert echoed(unusable).startswith("req-")
    for reply in (complete(live), complete(live, stream=True), complete(live, n=0), ask(live.port, "GET", "/nowhere")):
        assert reply.headers["x-request-id"].startswith("req-")
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        assert 0 <= int(reply.headers["openai-processing-ms"]) < 60_000
