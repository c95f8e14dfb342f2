"""What agents send to any API of the server: screenshots among their results, and the tools of many servers."""

import json
from typing import Any

import pytest

from engine.types.prompt import ChatTurn
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer

LEFT_OUT = "[image left out: this model reads text]"
URL = "data:image/png;base64,AAAA"
PART = {"type": "image_url", "image_url": {"url": URL}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
ITEM_PART = {"type": "input_image", "image_url": URL, "detail": "auto"}


def asked(live: LiveServer) -> Any:
    return live.call(lambda: live.ingress.asked[-1])


def chat(live: LiveServer, messages: list[Any], **fields: Any) -> Reply:
    return ask(live.port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def message(live: LiveServer, messages: list[Any], **fields: Any) -> Reply:
    return ask(live.port, "POST", "/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": messages, **fields})


def respond(live: LiveServer, items: list[Any], **fields: Any) -> Reply:
    return ask(live.port, "POST", "/v1/responses", {"model": MODEL, "input": items, **fields})


def call(name: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_an_image_in_a_tools_result_is_said_to_be_left_out(live: LiveServer) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "seen"}, BLOCK]}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    said = {"role": "user", "content": "look"}
    called = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    texts = [{"type": "input_text", "text": "seen"}, ITEM_PART]
    outputs = {
        "chat": chat(live, [
            said, {"role": "assistant", "tool_calls": [call("look")]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen"}, PART]},
        ]),
        "messages": message(live, [
            said, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]},
        ]),
        "responses": respond(live, [
            said, called, {"type": "function_call_output", "call_id": "c1", "output": texts},
        ]),
    }  # fmt: skip
    assert {name: reply.status for name, reply in outputs.items()} == dict.fromkeys(outputs, 200)
    results = [turn.content for prompt, *_ in live.call(lambda: live.ingress.asked[-3:]) for turn in prompt[2:]]
    assert [text.replace("\n", "") for text in results] == [f"seen{LEFT_OUT}"] * 3


@pytest.mark.parametrize("send, part", [(chat, PART), (message, BLOCK), (respond, ITEM_PART)])
def test_an_image_is_refused_where_it_comes_and_ends_no_conversation_later(
    live: LiveServer, send: Any, part: dict[str, Any]
) -> None:
    shown = {"role": "user", "content": [part]}
    answer, more = {"role": "assistant", "content": "I cannot."}, {"role": "user", "content": "why?"}
    for refused in ([shown], [more, answer, shown], [shown, {"role": "user", "content": "hm"}]):
        reply = send(live, refused)
        assert (reply.status, "read and write text alone" in reply.error["message"]) == (400, True)
    assert send(live, [shown, answer, more]).status == 200
    assert asked(live)[0] == (ChatTurn("user", LEFT_OUT), ChatTurn("assistant", "I cannot."), ChatTurn("user", "why?"))
    unknown = {"role": "user", "content": [{"type": "text_", "text": "x"}]}
    assert send(live, [unknown, answer, more]).status == 400, "what is not known may be a mistake"


@pytest.mark.parametrize(
    "send, tool",
    [
        (chat, {"type": "function", "function": {"name": "NAME", "description": "Do."}}),
        (message, {"name": "NAME", "description": "Do.", "input_schema": {"type": "object"}}),
        (respond, {"type": "function", "name": "NAME", "description": "Do."}),
    ],
)
def test_tools_of_many_servers_are_taken(live: LiveServer, send: Any, tool: dict[str, Any]) -> None:
    written = json.dumps(tool)
    tools = [json.loads(written.replace("NAME", f"f{number}")) for number in range(1025)]
    said = [{"role": "user", "content": "hi"}]
    assert send(live, said, tools=tools[:1024]).status == 200
    assert len(json.loads(asked(live)[2].chat.tools)) == 1024
    assert send(live, said, tools=tools).status == 400
