"""Which grammar a request with tools asks for, and what ends in the middle of a call."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from engine.types.params import Grammar
from tests.server import fake_ingress
from tests.server.engine_server import EngineServer
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
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
    assert shape(live, tools=[tool()], response_format=FORMAT, tool_choice="any") == forced
    assert "otherwise" not in forced, "there is no answer that could have a format"
    plain = grammar(live, tools=[tool()], response_format=FORMAT, tool_choice="none")
    assert plain is not None
    assert plain.kind == "json_schema"


def test_a_grammar_makes_the_reading_of_calls_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    written = '{"type": "function", "name": "look", "parameters": {"n": "no number"}}'
    monkeypatch.setattr(fake_ingress, "CALL", written)
    with LiveServer(tool_parser="llama3_json") as live:
        for strict, called in ((False, True), (True, False)):
            messages = [{"role": "user", "content": "!call"}]
            body = {"model": MODEL, "messages": messages, "tools": [tool(strict=strict)]}
            message = json.loads(ask(live.port, "POST", "/v1/chat/completions", body).body)["choices"][0]["message"]
            assert ("tool_calls" in message, message["content"]) == (called, None if called else written)


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


@contextmanager
def serving(form: str) -> Iterator[openai.OpenAI]:
    with (
        EngineServer(model={"name": "demo"}, plugins={"tool_parser": form}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving("hermes") as client:
        yield client


@pytest.fixture(scope="module")
def llama_client() -> Iterator[openai.OpenAI]:
    with serving("llama3_json") as client:
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


@pytest.mark.parametrize("name", ["client", "llama_client"])
def test_an_answer_beside_tools_has_its_format(name: str, request: pytest.FixtureRequest) -> None:
    """Either is short enough for the model to finish, and both begin like a call in the llama3 format.

    The model likes calls: it answers where the first letters of a call and of the tool's name are kept from it."""
    client: openai.OpenAI = request.getfixturevalue(name)
    values = ["yes", "no"]
    schema = {"type": "object", "properties": {"name": {"enum": values}}, "required": ["name"]}
    schema["additionalProperties"] = False
    asked = {
        "tools": [tool(strict=True, parameters=schema)],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "parallel_tool_calls": False,
        "temperature": 1.0,
    }
    vocabulary = Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab()
    no_call = {str(token_id): -100 for token, token_id in vocabulary.items() if token[0] in "<l"}
    endings = []
    for seed, bias in product(range(2), ({}, no_call)):
        asked["logit_bias"] = bias
        (choice,) = chat(client, seed=seed, **asked).choices
        endings.append(choice.finish_reason)
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        if calls:
            assert (choice.finish_reason, choice.message.content, len(calls)) == ("tool_calls", None, 1)
        written = calls[0][1] if calls else choice.message.content
        assert json.loads(written) in [{"name": value} for value in values]
        deltas = [one.delta for chunk in chat(client, seed=seed, stream=True, **asked) for one in chunk.choices]
        streamed = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        assert [call.name for call in streamed if call.name] == [called for called, _ in calls]
        assert "".join(call.arguments or "" for call in streamed) == "".join(arguments for _, arguments in calls)
    assert endings == ["tool_calls", "stop"] * 2


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


@pytest.mark.parametrize("name", ["client", "llama_client"])
@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call_that_is_cut_before_its_name_is_nothing(
    name: str, named: bool, request: pytest.FixtureRequest
) -> None:
    client: openai.OpenAI = request.getfixturevalue(name)
    function = tool("a_function_with_a_long_name")
    by_name = {"type": "function", "function": {"name": function["function"]["name"]}}
    asked = {"tools": [function], "tool_choice": by_name if named else "required"}
    for end in ({"max_tokens": 1}, {"max_tokens": 4}, {"stop": ["_with"]}):
        (choice,) = chat(client, **asked, **end).choices
        reason = "stop" if "stop" in end else "length"
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == (reason, "", None)
        events = [one for chunk in chat(client, stream=True, **asked, **end) for one in chunk.choices]
        assert "".join(one.delta.content or "" for one in events) == ""
        assert all(one.delta.tool_calls is None for one in events)
        assert events[-1].finish_reason == reason


@pytest.mark.parametrize("name", ["client", "llama_client"])
def test_a_response_with_a_forced_call_that_is_cut_before_its_name_is_empty(
    name: str, request: pytest.FixtureRequest
) -> None:
    client: openai.OpenAI = request.getfixturevalue(name)
    flat = {"type": "function", "name": "a_function_with_a_long_name", "parameters": SCHEMA}
    asked = {"model": "demo", "input": "hello", "tools": [flat], "tool_choice": "required", "max_output_tokens": 4}
    answer = client.responses.create(**asked)
    assert (answer.status, answer.output_text) == ("incomplete", "")
    assert [item.type for item in answer.output] == ["message"]
    events = list(client.responses.create(**asked, stream=True))
    assert not [event for event in events if event.type == "response.output_text.delta"]
    assert events[-1].response.output_text == ""


def test_a_response_tells_a_call_that_was_cut(client: openai.OpenAI) -> None:
    flat = {"type": "function", "name": "look", "parameters": SCHEMA}
    request = {"model": "demo", "input": "hello", "tools": [flat], "tool_choice": "required", "temperature": 0}
    answer = client.responses.create(**request, parallel_tool_calls=False, extra_body={"stop": ['n"']})
    assert [(item.type, item.status) for item in answer.output] == [("function_call", "incomplete")]
