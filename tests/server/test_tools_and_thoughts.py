"""Calls and thoughts in chat answers and responses, streamed and not, as the official client sees them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine.messages import RequestOptions
from engine.types.prompt import ChatTurn, ToolCall
from tests.plugins.model_outputs import TOOL_PARSERS, Subject
from tests.server import fake_ingress
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALLS = [{"role": "user", "content": "!call"}]
THINKS = [{"role": "user", "content": "!think"}]
ARGUMENTS = {"at": "δ", "n": [1, 2]}


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chunks(client: openai.OpenAI, **request: Any) -> list[Any]:
    stream = client.chat.completions.create(model=MODEL, stream=True, **request)
    return [choice for chunk in stream for choice in chunk.choices]


def test_a_call_is_an_entry_of_the_message(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model=MODEL, messages=CALLS, tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure.\n"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "look", ARGUMENTS)
    assert call.id.startswith("call_")


def test_streamed_calls_add_up_to_the_same(client: openai.OpenAI) -> None:
    choices = chunks(client, messages=CALLS, tools=[TOOL])
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert deltas[0].id
    assert deltas[0].function.name == "look"
    assert all((call.id, call.function.name, call.type) == (None, None, None) for call in deltas[1:])
    assert {call.index for call in deltas} == {0}
    assert len(deltas) > 3, "arguments come as they are written"
    assert json.loads("".join(call.function.arguments for call in deltas)) == ARGUMENTS
    assert "".join(choice.delta.content or "" for choice in choices) == "Sure.\n"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("request_", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(client: openai.OpenAI, request_: dict[str, Any]) -> None:
    (choice,) = client.chat.completions.create(model=MODEL, messages=CALLS, **request_).choices
    assert "<tool_call>" in choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def asked(live: LiveServer) -> tuple[Any, Any, RequestOptions]:
    return live.call(lambda: live.ingress.asked[-1])


def test_the_template_hears_of_tools_unless_none_may_be_called(live: LiveServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=CALLS, tools=[TOOL])
    _, params, options = asked(live)
    assert json.loads(options.chat.tools) == [TOOL]
    assert params.grammar is None
    client.chat.completions.create(model=MODEL, messages=CALLS, tools=[TOOL], tool_choice="none")
    assert asked(live)[2].chat.tools == ""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_call_that_must_come_is_demanded_by_a_grammar(live: LiveServer, client: openai.OpenAI, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    client.chat.completions.create(model=MODEL, messages=CALLS, tools=[other, TOOL], tool_choice=choice)
    grammar = asked(live)[1].grammar
    assert grammar.kind == "tool_calls"
    assert ("other" in grammar.source) == (choice == "required")
    assert json.loads(grammar.source)["many"] == (choice == "required")


def test_earlier_calls_and_their_results_reach_the_template(live: LiveServer, client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    assert asked(live)[0] == (
        ChatTurn("user", "look"),
        ChatTurn("assistant", "", reasoning="hm", tool_calls=(ToolCall("c1", "look", '{"at": 1}'),)),
        ChatTurn("tool", "nothing", tool_call_id="c1"),
    )


CUT_OFF = {
    "cut off": '{"city": "Pa',
    "cut off behind half an emoji": '{"city": "\\ud83d',
    "a list": "[1]",
    "null": "null",
    "a number beyond all": '{"a": 1e999}',
    "an integer beyond all": '{"a": ' + "9" * 5000 + "}",
    "with something behind": '{"a": 1}}',
    "not JSON's own": '{"a": NaN}',
}


@pytest.mark.parametrize("arguments", [*CUT_OFF.values(), None], ids=[*CUT_OFF, "not given"])
def test_a_call_that_was_cut_off_is_one_without_arguments(live: LiveServer, arguments: str | None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "invalid JSON"}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}, result]
    assert ask(live.port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages}).status == 200
    turns = (
        ChatTurn("user", "u"),
        ChatTurn("assistant", "", tool_calls=(ToolCall("c1", "look", "{}"),)),
        ChatTurn("tool", "invalid JSON", tool_call_id="c1"),
    )
    assert asked(live)[0] == turns
    items = [
        {"role": "user", "content": "u"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "invalid JSON"},
    ]
    assert ask(live.port, "POST", "/v1/responses", {"model": MODEL, "input": items}).status == 200
    assert asked(live)[0] == turns


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": ' * 100_000 + "1" + "}" * 100_000])
def test_arguments_that_no_model_wrote_are_refused_by_their_name(live: LiveServer, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
    reply = ask(live.port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages[1].tool_calls[0].function.arguments")
    items = [{"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}]
    reply = ask(live.port, "POST", "/v1/responses", {"model": MODEL, "input": items})
    assert (reply.status, reply.error["param"]) == (400, "input[0].arguments")


@pytest.mark.parametrize("fields", [{}, {"tool_call_id": None}, {"tool_call_id": ""}])
def test_a_result_says_of_which_call_it_is(live: LiveServer, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "tool", "content": "x", **fields}]
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = ask(live.port, "POST", path, {"model": MODEL, "messages": messages})
        assert (reply.status, reply.error["param"]) == (400, "messages[1].tool_call_id")


def test_thoughts_come_under_both_names_and_are_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=THINKS)
    message = answer.choices[0].message
    assert message.reasoning_content
    assert message.reasoning_content == message.reasoning
    assert message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    deltas = [choice.delta for choice in chunks(client, messages=THINKS)]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == message.reasoning
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_thoughts_are_told_apart_unless_asked_otherwise(live: LiveServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=THINKS)
    assert asked(live)[2].chat.split_reasoning
    client.chat.completions.create(model=MODEL, messages=THINKS, extra_body={"separate_reasoning": False})
    assert not asked(live)[2].chat.split_reasoning


def test_template_variables_pass_if_the_configuration_lists_them(live: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=THINKS, extra_body={"chat_template_kwargs": {"messages": "x"}}
        )
    assert refused.value.param == "chat_template_kwargs"
    card = live.backend.card
    with LiveServer(card=type(card)(**{**card_fields(card), "template_variables": ("enable_thinking",)})) as other:
        with openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as second:
            extra = {"chat_template_kwargs": {"enable_thinking": False}}
            second.chat.completions.create(model=MODEL, messages=THINKS, extra_body=extra, reasoning_effort="low")
        variables = json.loads(asked(other)[2].chat.variables)
    assert variables == {"enable_thinking": False, "reasoning_effort": "low"}


def card_fields(card: Any) -> dict[str, Any]:
    return {name: getattr(card, name) for name in card.__struct_fields__}


# ---- responses ------------------------------------------------------------------------------


def test_a_response_has_items_in_order(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="!think", instructions="Be brief.")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.status == "completed"
    assert answer.output_text == answer.output[1].content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.instructions == "Be brief."


def test_events_add_up_to_the_response(client: openai.OpenAI) -> None:
    for request in (
        {"input": "!think"},
        {"input": "!call", "tools": [FLAT]},
        {"input": "plain", "max_output_tokens": 4},
    ):
        whole = client.responses.create(model=MODEL, **request)
        events = list(client.responses.create(model=MODEL, stream=True, **request))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[0].response.status == "in_progress"
        last = events[-1]
        assert last.type == f"response.{whole.status}"
        texts, arguments = "", ""
        for event in events:
            if event.type == "response.output_text.delta":
                texts += event.delta
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        assert texts == whole.output_text == last.response.output_text
        calls = [item for item in whole.output if item.type == "function_call"]
        assert arguments == "".join(call.arguments for call in calls)
        done = [event.item for event in events if event.type == "response.output_item.done"]
        added = [event for event in events if event.type == "response.output_item.added"]
        assert done == last.response.output
        assert [event.output_index for event in added] == list(range(len(whole.output)))
        assert [item.type for item in done] == [item.type for item in whole.output]


@pytest.mark.parametrize("subject", TOOL_PARSERS, ids=lambda one: one.write.__name__)
@pytest.mark.parametrize("left_out", [0, 12])
def test_every_format_gives_the_same_streamed_or_not(
    subject: Subject, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"text": 'a "b" é', "table": {"x": [1, None]}}
    output = ("" if subject.alone else "Sure. ") + subject.write([("look", {}), ("look", arguments)])
    monkeypatch.setattr(fake_ingress, "CALL", output[: len(output) - left_out])
    with (
        LiveServer(tool_parser=subject.plugin) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (choice,) = client.chat.completions.create(model=MODEL, messages=CALLS, tools=[TOOL]).choices
        streamed = chunks(client, messages=CALLS, tools=[TOOL])
        response = client.responses.create(model=MODEL, input="!call", tools=[FLAT])
        (*_, last) = client.responses.create(model=MODEL, input="!call", tools=[FLAT], stream=True)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    told = [call for one in streamed for call in one.delta.tool_calls or ()]
    assert calls == [
        (name, "".join(call.function.arguments for call in told if call.index == index))
        for index, name in enumerate(call.function.name for call in told if call.function.name)
    ]
    assert "".join(one.delta.content or "" for one in streamed) == (choice.message.content or "")
    assert streamed[-1].finish_reason == choice.finish_reason
    for one in (response, last.response):
        assert [(item.name, item.arguments) for item in one.output if item.type == "function_call"] == calls
        assert one.output_text == (choice.message.content or "")
    if not left_out:
        assert [json.loads(written) for _, written in calls] == [{}, arguments]
        assert choice.finish_reason == "tool_calls"


def test_log_probabilities_add_up_to_those_of_the_response(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True}
    for request in ({"input": "plain"}, {"input": "plain", "extra_body": extra}):
        request = {**request, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        whole = client.responses.create(model=MODEL, **request).output[0].content[0]
        events = list(client.responses.create(model=MODEL, stream=True, **request))
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert len(whole.logprobs) == 12
        assert [one.token for one in done.logprobs] == [one.token for one in whole.logprobs]
        assert all(one.token.startswith("token_id:") for one in whole.logprobs) == ("extra_body" in request)


def test_where_calls_are_looked_for_log_probabilities_come_at_the_end(client: openai.OpenAI) -> None:
    request = {"include": ["message.output_text.logprobs"], "tools": [FLAT]}
    for text, number in (("plain", 12), ("!call", 0)):
        whole = client.responses.create(model=MODEL, input=text, **request)
        events = list(client.responses.create(model=MODEL, input=text, stream=True, **request))
        assert not any(event.logprobs for event in events if event.type == "response.output_text.delta")
        for answer in (whole, events[-1].response):
            assert len(answer.output[0].content[0].logprobs) == number


def test_a_response_that_was_cut_says_so(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="x", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


def test_items_of_the_input_become_turns(live: LiveServer, client: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "done", "annotations": []}]},
        {"role": "user", "content": "more"},
    ]
    client.responses.create(model=MODEL, input=items, instructions="i")
    assert asked(live)[0] == (
        ChatTurn("system", "i"),
        ChatTurn("system", "d"),
        ChatTurn("user", "u"),
        ChatTurn(
            "assistant",
            "",
            reasoning="hm",
            tool_calls=(ToolCall("c1", "look", "{}"), ToolCall("c2", "look", '{"n": 1}')),
        ),
        ChatTurn("tool", "a", tool_call_id="c1"),
        ChatTurn("tool", "b", tool_call_id="c2"),
        ChatTurn("assistant", "done"),
        ChatTurn("user", "more"),
    )


@pytest.mark.parametrize(
    "request_, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"extra_body": {"prompt": {"id": "p"}}}, "prompt"),
        ({"text": {"format": {"type": "text"}}, "extra_body": {"response_format": {"type": "text"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "robot"}]}, "tools[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(client: openai.OpenAI, request_: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, **{"input": "x", "stream": stream, **request_})
        assert refused.value.param == param
