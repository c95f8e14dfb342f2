"""POST /v1/messages: bodies, answers and events as Anthropic's own client sends and reads them."""

import json
from typing import Any

import msgspec
import pytest

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from engine.types.prompt import ChatTurn, ToolCall
from server.extensions.anthropic.objects import message_error
from server.model_card import ModelCard
from server.openai.conversation import warn_left_out
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer

TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
ARGUMENTS = {"at": "δ", "n": [1, 2]}
PATH = "/v1/messages"


def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": content}], **fields}


def message(live: LiveServer, content: Any = "hi", **fields: Any) -> Any:
    reply = ask(live.port, "POST", PATH, body(content, **fields))
    assert reply.status == 200, reply.body
    return reply.json


def events(reply: Reply) -> list[dict[str, Any]]:
    """The stream's events, each of which is announced by its type."""
    *parts, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from events in the one order in which they may come."""
    first, *middle, end, stop = events
    assert (first["type"], end["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    whole, is_open = first["message"], False
    assert (whole["content"], whole["stop_reason"]) == ([], None)
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(whole["content"])
            whole["content"].append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(whole["content"]) - 1
        block = whole["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if (text := block.pop("json")) or block["type"] == "tool_use":
                block["input"] = json.loads(text or "{}")
            continue
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                block["json"] += text
            case other:
                pytest.fail(f"unknown delta {other}")
    assert not is_open
    return {**whole, **end["delta"], "usage": end["usage"]}


@pytest.mark.parametrize(
    "content, fields, types, reason",
    [
        ("hi", {}, ["text"], "end_turn"),
        ("hi", {"max_tokens": 3}, ["text"], "max_tokens"),
        ("hi", {"stop_sequences": ["omega"]}, ["text"], "stop_sequence"),
        ("!call", {"tools": [TOOL]}, ["text", "tool_use"], "tool_use"),
        ("!think", {}, ["thinking", "text"], "end_turn"),
    ],
)
def test_events_add_up_to_the_answer(
    live: LiveServer, content: str, fields: dict[str, Any], types: list[str], reason: str
) -> None:
    asked = body(content, temperature=0, **fields)
    whole = ask(live.port, "POST", PATH, asked).json
    found = events(ask(live.port, "POST", PATH, {**asked, "stream": True}))
    streamed = built(found)
    for one in (whole, streamed):
        assert one.pop("id").startswith("msg_")
        for block in one["content"]:
            assert block.pop("id", "toolu_").startswith("toolu_")
    assert streamed == whole
    assert ([block["type"] for block in whole["content"]], whole["stop_reason"]) == (types, reason)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert whole["stop_sequence"] == (fields["stop_sequences"][0] if reason == "stop_sequence" else None)
    counts = whole["usage"]
    assert counts["input_tokens"] + counts["cache_read_input_tokens"] > counts["cache_read_input_tokens"] > 0
    if reason == "tool_use":
        assert whole["content"][-1]["input"] == ARGUMENTS
        assert sum(event["type"] == "content_block_delta" for event in found) > 3


def asked(live: LiveServer) -> tuple[Any, Any, Any]:
    return live.call(lambda: live.ingress.asked[-1])


def test_blocks_become_turns(live: LiveServer) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "d"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "e"}]},
    ]
    message(live, messages=messages, system=[{"type": "text", "text": "s"}], tools=[TOOL])
    turns, _, options = asked(live)
    assert turns == (
        ChatTurn("system", "s"),
        ChatTurn("user", "a\nb\nc"),
        ChatTurn("assistant", "d", reasoning="hm", tool_calls=(ToolCall("t1", "look", '{"at":1}'),)),
        ChatTurn("tool", "seen", tool_call_id="t1"),
        ChatTurn("user", "e"),
    )
    (told,) = json.loads(options.chat.tools)
    assert told["function"]["parameters"] == TOOL["input_schema"]
    assert (options.chat.add_generation_prompt, options.chat.continue_final) == (True, False)


def test_an_assistants_last_message_goes_on(live: LiveServer) -> None:
    message(live, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    chat = asked(live)[2].chat
    assert (chat.add_generation_prompt, chat.continue_final) == (False, True)


def test_what_else_is_asked_reaches_the_engine() -> None:
    card = ModelCard(name=MODEL, max_model_len=1024, vocab_size=1000, created=1, template_variables=("thinking",))
    form = {"type": "json_schema", "schema": {"type": "object"}}
    with LiveServer(card=card) as live:
        fields = {"top_k": 5, "top_p": 0.5, "thinking": {"type": "disabled"}, "max_tokens": 32000}
        message(live, **fields, output_config={"format": form})
        _, params, options = asked(live)
        assert (params.top_k, params.top_p, params.max_tokens) == (5, 0.5, None)
        assert params.grammar.kind == "json_schema"
        assert json.loads(options.chat.variables) == {"thinking": False}
        for choice, forced in (
            ({"type": "any"}, True),
            ({"type": "tool", "name": "look"}, True),
            ({"type": "auto"}, False),
        ):
            message(live, tools=[TOOL], tool_choice=choice)
            assert (asked(live)[1].grammar is not None) == forced


BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"}


def test_claude_codes_line_about_its_session_is_not_in_the_prompt(live: LiveServer) -> None:
    said = {"type": "text", "text": "Be brief."}
    inline = {"role": "system", "content": [BILLING]}
    message(live, messages=[{"role": "user", "content": "a"}, inline], system=[BILLING, said])
    assert asked(live)[0] == (ChatTurn("system", "Be brief."), ChatTurn("user", "a"))
    message(live, system=[BILLING])
    assert asked(live)[0] == (ChatTurn("user", "hi"),)
    message(live, [BILLING])
    assert asked(live)[0] == (ChatTurn("user", BILLING["text"]),), "a user's text stays"


def test_explain_says_that_the_line_was_left_out(live: LiveServer) -> None:
    reply = ask(live.port, "POST", PATH, body(system=[BILLING]))
    assert "x-anthropic-billing-header was left out" in " ".join(notes(live, reply))
    assert notes(live, ask(live.port, "POST", PATH, body(system="Be brief."))) == []


def notes(live: LiveServer, reply: Reply) -> list[str]:
    told: list[str] = ask(live.port, "GET", f"/explain/{reply.json['id']}").json["notes"]
    return told


def test_blocks_that_have_text_are_text_and_what_ran_elsewhere_is_left_out(live: LiveServer) -> None:
    text = {"type": "text", "text": "z"}
    lines = {"type": "content", "content": [text, {"type": "text", "text": "two"}]}
    found = {"type": "search_result", "source": "http://x", "title": "Found", "content": [text]}
    named = [{"type": "tool_reference", "tool_name": "look"}]
    reference = {"type": "tool_result", "tool_use_id": "t1", "content": named}
    failed = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    searched = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": failed}
    messages = [
        {"role": "user", "content": [
            {"type": "document", "title": "Notes", "context": "of May", "source": {"type": "text", "data": "said"}},
            {"type": "document", "source": lines}, found,
        ]},
        {"role": "assistant", "content": [
            {"type": "compaction", "content": "So far."}, {"type": "server_tool_use", "id": "s1", "name": "web_search"},
            searched, {"type": "text", "text": "Yes."}, {"type": "tool_use", "id": "t1", "name": "find"},
        ]},
        {"role": "user", "content": [reference]},
    ]  # fmt: skip
    message(live, messages=messages)
    assert asked(live)[0] == (
        ChatTurn("user", "Notes\nof May\nsaid\nz\ntwo\nFound\nhttp://x\nz"),
        ChatTurn("assistant", "So far.Yes.", tool_calls=(ToolCall("t1", "find", "{}"),)),
        ChatTurn("tool", "look", tool_call_id="t1"),
    )


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
NO_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": {"type": "text"}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}


def test_tools_known_by_their_type_are_functions_unless_they_run_elsewhere(
    live: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    warn_left_out.cache_clear()
    typed = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
    ]
    toolset = {"type": "mcp_toolset", "mcp_server_name": "x"}
    for _ in range(2):
        message(live, tools=[WEB_SEARCH, toolset, *typed, {**TOOL, "type": "custom"}])
    told = [tool["function"] for tool in json.loads(asked(live)[2].chat.tools)]
    assert [function["name"] for function in told] == ["bash", "str_replace_based_edit_tool", "memory", "look"]
    assert "restart" in told[0]["parameters"]["properties"]
    assert "rename" in told[2]["parameters"]["properties"]["command"]["enum"]
    warned = [record.getMessage() for record in caplog.records if "cannot be run here" in record.getMessage()]
    assert [word for line in warned for word in line.split() if "_" in word] == ["web_search", "mcp_toolset"]
    message(live, tools=[WEB_SEARCH])
    assert asked(live)[2].chat.tools == ""
    message(live, tools=typed, tool_choice={"type": "tool", "name": "bash"})
    assert asked(live)[1].grammar is not None


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "robot_20250305", "name": "robot"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": [NO_RESULT]}]}, "content[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "robot"}]}]}, "content[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences="),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_errors_have_the_shape_that_its_clients_read(live: LiveServer, fields: dict[str, Any], named: str) -> None:
    reply = ask(live.port, "POST", PATH, body(**fields))
    assert (reply.status, reply.json["type"], reply.error["type"]) == (400, "error", "invalid_request_error")
    assert named in reply.error["message"]
    assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/count_tokens/x", "/api/event_logging/batch"])
def test_paths_that_its_clients_know_have_its_errors(live: LiveServer, path: str) -> None:
    reply = ask(live.port, "POST", path, {})
    assert (reply.status, reply.json["type"], reply.error["type"]) == (404, "error", "not_found_error")
    assert ask(live.port, "POST", "/v1/chat/nowhere", {}).error["code"] == "unknown_route"


@pytest.mark.parametrize("status, kind", [(500, "api_error"), (503, "overloaded_error"), (429, "rate_limit_error")])
def test_a_failure_in_a_stream_is_an_event(status: int, kind: str) -> None:
    error = message_error(RequestError("why", status=status))
    assert error.type == "error", "what announces the event"
    assert json.loads(msgspec.json.encode(error)) == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_the_key_may_come_in_a_header_of_its_own() -> None:
    with LiveServer(server=ServerSection(api_key="s3cret")) as live:
        for headers, status in (({}, 401), ({"X-Api-Key": "no"}, 401), ({"X-Api-Key": "s3cret"}, 200)):
            reply = ask(live.port, "POST", PATH, body(), headers)
            assert reply.status == status
        unauthorised = ask(live.port, "POST", PATH, body())
        assert (unauthorised.json["type"], unauthorised.error["type"]) == ("error", "authentication_error")
        assert (
            ask(live.port, "POST", PATH, body(model="other"), {"X-Api-Key": "s3cret"}).error["type"]
            == "not_found_error"
        )


@pytest.mark.parametrize(
    "role, content, observed",
    [
        ("user", [], "no blocks"),
        ("assistant", [], "no blocks"),
        ("user", [{"type": "redacted_thinking", "data": "x"}], "only redacted_thinking"),
        ("assistant", [{"type": "server_tool_use", "id": "a", "name": "x", "input": {}}], "only server_tool_use"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"system": "s"}])
def test_a_conversation_of_only_what_is_left_out_is_refused_by_name(
    live: LiveServer, role: str, content: Any, observed: str, fields: dict[str, Any]
) -> None:
    asked = {**body(**fields), "messages": [{"role": role, "content": content}]}
    for path in (PATH, f"{PATH}/count_tokens"):
        reply = ask(live.port, "POST", path, asked)
        assert reply.status == 400
        told = reply.json["error"]["message"]
        assert told.startswith("messages: they hold no text")
        assert observed in told
