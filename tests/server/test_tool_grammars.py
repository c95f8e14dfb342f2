"""Which grammar a request with tools asks for, and what ends in the middle of a call."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine.sampling.params import Grammar
from tests.server.engine_server import EngineServer
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "x"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def tool(name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def grammar(live: LiveServer, path: str = "/v1/chat/completions", **fields: Any) -> Grammar | None:
    given = {"input": "x"} if path == "/v1/responses" else {"messages": MESSAGES}
    reply = ask(live.port, "POST", path, {"model": MODEL, **given, **fields})
    assert reply.status == 200, reply.body
    return live.call(lambda: live.ingress.asked[-1][1].grammar)


def shape(live: LiveServer, **fields: Any) -> dict[str, Any]:
    found = grammar(live, **fields)
    assert found is not None
    assert found.kind == "tool_calls"
    return json.loads(found.source)


def test_tools_that_may_be_called_leave_the_output_free(live: LiveServer) -> None:
    assert grammar(live, tools=[tool()]) is None
    assert grammar(live, tools=[tool(strict=False)]) is None
    assert grammar(live, tools=[tool(strict=True)], tool_choice="none") is None


def test_strict_tools_are_followed_also_where_no_call_must_come(live: LiveServer) -> None:
    asked = shape(live, tools=[tool(strict=True), tool("other")])
    assert asked["otherwise"]["kind"] == "text"
    assert [call["schema"] for call in asked["calls"]] == [SCHEMA, {}], "nobody asked for the other one's"
    assert asked["many"]
    assert not shape(live, tools=[tool(strict=True)], parallel_tool_calls=False)["many"]
    flat = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    assert shape(live, path="/v1/responses", tools=[flat])["calls"][0]["schema"] == SCHEMA


def test_an_answer_may_have_a_format_and_tools_beside_it(live: LiveServer) -> None:
    asked = shape(live, tools=[tool()], response_format=FORMAT)
    assert asked["otherwise"]["kind"] == "json_schema"
    assert json.loads(asked["otherwise"]["source"]) == SCHEMA
    assert shape(live, tools=[tool()], guided_regex="[ab]")["otherwise"]["source"] == "[ab]"
    forced = shape(live, tools=[tool()], response_format=FORMAT, tool_choice="required")
    assert "otherwise" not in forced, "there is no answer that could have a format"
    plain = grammar(live, tools=[tool()], response_format=FORMAT, tool_choice="none")
    assert plain is not None
    assert plain.kind == "json_schema"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool(strict=True, parameters={"description": "x" * 70_000})]}, "tools"),
        ({"echo": True}, "echo"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_is_refused(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = ask(live.port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_without_a_grammar_tools_and_ignore_eos_go_together(live: LiveServer) -> None:
    assert grammar(live, tools=[tool()], ignore_eos=True, max_tokens=20) is None


# ---- with a model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    with EngineServer(model_={"name": "demo"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: EngineServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **request: Any) -> Any:
    messages = [{"role": "user", "content": "Write a function."}]
    return client.chat.completions.create(
        model="demo", **{"messages": messages, "max_tokens": 90, "temperature": 0, **request}
    )


def test_strict_tools_leave_text_as_it_is(client: openai.OpenAI) -> None:
    free = chat(client, tools=[tool()]).choices[0]
    assert free.message.tool_calls is None
    strict = chat(client, tools=[tool(strict=True)]).choices[0]
    assert strict.message.content == free.message.content


def test_an_answer_beside_tools_has_its_format(client: openai.OpenAI) -> None:
    request = {"tools": [tool()], "response_format": FORMAT, "temperature": 1.0}
    for seed in range(4):
        (choice,) = chat(client, seed=seed, **request).choices
        if choice.finish_reason == "tool_calls":
            assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)
        elif choice.finish_reason == "stop":
            assert set(json.loads(choice.message.content)) == {"n"}
        stream = chat(client, seed=seed, stream=True, **request)
        deltas = [one.delta for chunk in stream for one in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_no_call_to_be_made(client: openai.OpenAI, stream: bool) -> None:
    request = {"tools": [tool()], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    for stop, reason in (('n"', "stop"), ("</tool_call>", "tool_calls")):
        answer = chat(client, stop=[stop], **request)
        choices = [one for chunk in answer for one in chunk.choices] if stream else answer.choices
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == [reason]
        if stream:
            calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        else:
            calls = choices[0].message.tool_calls
        assert calls[0].function.name == "look"


def test_a_response_tells_a_call_that_was_cut(client: openai.OpenAI) -> None:
    flat = {"type": "function", "name": "look", "parameters": SCHEMA}
    request = {"model": "demo", "input": "hello", "tools": [flat], "tool_choice": "required", "temperature": 0}
    answer = client.responses.create(**request, parallel_tool_calls=False, extra_body={"stop": ['n"']})
    assert [(item.type, item.status) for item in answer.output] == [("function_call", "incomplete")]
