"""Tools of /v1/responses that are no plain functions, as Codex and OpenAI's agents send them and read their calls."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response

from engine.settings.sections import StorageSection
from engine.types.prompt import ChatTurn, ToolCall
from server.extensions.responses.endpoint import _tool_body
from server.extensions.responses.requests import InputItem
from server.extensions.responses.tools import RUN_BY_CLIENT, Callee, call_item, earlier_call
from server.openai.conversation import warn_left_out
from tests.server import fake_ingress
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
SPAWN = {"type": "function", "name": "spawn", "description": "Begin.", "strict": False, "parameters": PATH}
NAMESPACE = {"type": "namespace", "name": "agents_v1", "description": "Of agents.", "tools": [SPAWN]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "patch", "description": "Edit files.", "format": GRAMMAR}
LOOK = {"type": "function", "name": "look", "parameters": PATH}
SHELLS = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
NOT_RUN = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}, {"type": "tool_search"}]
OPERATION = {"type": "create_file", "path": "a.py", "diff": "+x"}


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(live: LiveServer) -> Any:
    return live.call(lambda: live.ingress.asked[-1])


def told(live: LiveServer) -> dict[str, Any]:
    """The functions that the model is told of, by name."""
    tools = json.loads(asked(live)[2].chat.tools or "[]")
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def ask_for(live: LiveServer, **fields: Any) -> Any:
    reply = ask(live.port, "POST", "/v1/responses", {"model": MODEL, "input": "!call", **fields})
    assert reply.status == 200, reply.body
    return reply.json


def writes(monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any]) -> None:
    """The model calls the function."""
    call = json.dumps({"name": name, "arguments": arguments})
    monkeypatch.setattr(fake_ingress, "CALL", f"<tool_call>\n{call}\n</tool_call>")


def test_codexs_tools_are_functions_and_what_runs_elsewhere_is_left_out(
    live: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    warn_left_out.cache_clear()
    answer = ask_for(live, tools=[LOOK, NAMESPACE, PATCH, *NOT_RUN, *SHELLS])
    assert list(told(live)) == ["look", "agents_v1__spawn", "patch", "local_shell", "shell", "apply_patch"]
    assert told(live)["agents_v1__spawn"]["parameters"] == PATH
    assert told(live)["patch"]["parameters"]["required"] == ["input"]
    assert "start: /.+/" in told(live)["patch"]["description"]
    warned = [record.args[0] for record in caplog.records if "cannot be run here" in record.getMessage()]
    assert warned == [tool["type"] for tool in NOT_RUN]
    types = [tool["type"] for tool in answer["tools"]]
    assert types == ["function", "namespace", "custom", "local_shell", "shell", "apply_patch"]
    assert answer["tools"][1] == NAMESPACE
    ask_for(live, tools=NOT_RUN)
    assert told(live) == {}


CALLS = {
    "agents_v1__spawn": (
        {"path": "x"},
        {"type": "function_call", "name": "spawn", "namespace": "agents_v1", "arguments": '{"path": "x"}'},
    ),
    "patch": ({"input": "*** δ"}, {"type": "custom_tool_call", "name": "patch", "input": "*** δ"}),
    "local_shell": (
        {"command": "ls -l"},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["bash", "-lc", "ls -l"], "env": {}}},
    ),
    "shell": (
        {"command": "ls"},
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
    ),
    "apply_patch": (OPERATION, {"type": "apply_patch_call", "operation": OPERATION}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_as_its_tools_clients_read_it_streamed_or_not_and_back(
    live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    arguments, expected = CALLS[name]
    writes(monkeypatch, name, arguments)
    tools = [NAMESPACE, PATCH, *SHELLS]
    whole = ask_for(live, tools=tools)
    (call,) = whole["output"]
    assert call == {**expected, "status": "completed", "id": call["id"], "call_id": call["call_id"]}
    items = {**whole, "tools": [], "output": whole["output"]}
    Response.model_validate_json(json.dumps(items), strict=True)
    events = list(client.responses.create(model=MODEL, input="!call", tools=tools, stream=True))
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output[0]
    assert {**done.to_dict(), "id": "", "call_id": ""} == {**call, "id": "", "call_id": ""}
    (added,) = [event.item for event in events if event.type == "response.output_item.added"]
    assert (added.type, added.call_id) == (done.type, done.call_id)
    pieces = [event.delta for event in events if event.type.endswith(".delta")]
    assert "".join(pieces) == call.get("arguments", call.get("input", ""))

    output = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "seen"}
    ask_for(live, tools=tools, input=[{"role": "user", "content": "u"}, call, output])
    written = json.dumps(arguments, ensure_ascii=False)
    turns = asked(live)[0]
    assert turns[1].tool_calls[0].name == name
    assert json.loads(turns[1].tool_calls[0].arguments) == json.loads(written)
    assert turns[2] == ChatTurn("tool", "seen", tool_call_id=call["call_id"])


def test_a_call_that_was_cut_off_is_incomplete(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CALLS:
        cut = '<tool_call>\n{"name": "' + name + '", "arguments": {"input": "ab'
        monkeypatch.setattr(fake_ingress, "CALL", cut)
        (call,) = ask_for(live, tools=[NAMESPACE, PATCH, *SHELLS])["output"]
        assert (call["type"], call["status"]) == (CALLS[name][1]["type"], "incomplete")


def test_foreign_calls_are_calls_and_what_ran_elsewhere_is_left_out(live: LiveServer) -> None:
    shown = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    items = [
        {"role": "user", "content": "u"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "s", "tools": []},
        {"type": "compaction", "id": "c", "encrypted_content": "x"},
        {"type": "computer_call_output", "call_id": "p", "output": {"type": "computer_screenshot", "image_url": "x"}},
        {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["git", "log", "a b"]}},
        {"type": "local_shell_call_output", "id": "c1", "output": "done"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls", "pwd"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": shown},
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
    ]
    ask_for(live, input=items)
    assert asked(live)[0] == (
        ChatTurn("user", "u"),
        ChatTurn("assistant", "", tool_calls=(ToolCall("c1", "local_shell", '{"command":"git log \'a b\'"}'),)),
        ChatTurn("tool", "done", tool_call_id="c1"),
        ChatTurn("assistant", "", tool_calls=(ToolCall("c2", "shell", '{"command":"ls\\npwd"}'),)),
        ChatTurn("tool", json.dumps(shown, separators=(",", ":")), tool_call_id="c2"),
        ChatTurn("assistant", "", tool_calls=(ToolCall("c3", "apply_patch", '{"type":"delete_file","path":"a"}'),)),
        ChatTurn("tool", "completed", tool_call_id="c3"),
    )


@pytest.mark.parametrize(
    "choice, left, is_forced",
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}, ["patch"], False),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "shell"}, {"type": "function", "name": "look"}],
            },
            ["look", "shell"],
            True,
        ),
        ({"type": "allowed_tools", "tools": [{"type": "namespace", "name": "agents_v1"}]}, ["agents_v1__spawn"], False),
        ({"type": "custom", "name": "patch"}, None, True),
        ({"type": "apply_patch"}, None, True),
        ({"type": "function", "name": "agents_v1__spawn"}, None, True),
    ],
)
def test_a_choice_among_tools_is_followed(
    live: LiveServer, choice: dict[str, Any], left: list[str] | None, is_forced: bool
) -> None:
    answer = ask_for(live, tools=[LOOK, NAMESPACE, PATCH, *SHELLS], tool_choice=choice)
    assert left is None or list(told(live)) == left
    assert (asked(live)[1].grammar is not None) == is_forced
    assert answer["tool_choice"] == choice


def test_a_conversation_with_custom_calls_goes_on_from_where_it_is_stored(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes(monkeypatch, "patch", {"input": "x"})
    with LiveServer(storage=StorageSection(folder=str(tmp_path))) as live:
        first = ask_for(live, tools=[PATCH])
        output = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "done"}
        ask_for(live, tools=[PATCH], input=[output], previous_response_id=first["id"])
        assert [turn.role for turn in asked(live)[0]] == ["user", "assistant", "tool"]
        assert asked(live)[0][1].tool_calls[0].name == "patch"


def test_a_schema_is_told_as_it_was_given() -> None:
    schema = {"properties": {"a": {"type": ["string", "null"], "default": None}}}
    told = _tool_body({"type": "function", "name": "f", "description": None, "parameters": schema})
    assert told == {"type": "function", "name": "f", "description": None, "parameters": schema, "strict": None}


def called(kind: str, arguments: str) -> dict[str, Any]:
    """A whole call of a tool as its clients get it."""
    callee = Callee(kind, kind, None, RUN_BY_CLIENT.get(kind, RUN_BY_CLIENT["shell"]))
    item: dict[str, Any] = json.loads(msgspec.json.encode(call_item(callee, "0" * 32, arguments, "completed")))
    return item


@pytest.mark.parametrize(
    "arguments, lines",
    [
        ('{"command": ["bash", "-lc", "ls | wc"]}', ["ls | wc"]),
        ('{"command": ["git", "log", "a b"]}', ["git log 'a b'"]),
        ('{"command": ["bash", "-c", "echo $0", "x"]}', ["bash -c 'echo $0' x"]),
        ('{"command": ["sleep", 5]}', ["sleep 5"]),
        ('{"commands": ["ls", "pwd"]}', ["ls", "pwd"]),
        ('{"commands": "ls"}', ["ls"]),
        ('{"cmd": "ls"}', ["ls"]),
    ],
)
def test_a_shells_call_of_another_shape_keeps_its_command(arguments: str, lines: list[str]) -> None:
    local, newer = called("local_shell", arguments), called("shell", arguments)
    assert (local["action"]["command"], local["status"]) == (["bash", "-lc", "\n".join(lines)], "completed")
    assert (newer["action"]["commands"], newer["status"]) == (lines, "completed")
    for item in (local, newer):
        _, command = earlier_call(msgspec.convert(item, InputItem), "input[0]")
        assert command == {"command": "\n".join(lines)}


@pytest.mark.parametrize(
    "arguments, text",
    [
        ('{"patch": "*** δ"}', "*** δ"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("*** Begin", "*** Begin"),
    ],
)
def test_a_custom_tools_call_of_another_shape_keeps_its_text(arguments: str, text: str) -> None:
    item = called("custom", arguments)
    assert (item["input"], item["status"]) == (text, "completed")


@pytest.mark.parametrize(
    "arguments, operation",
    [
        ({"operation": OPERATION}, OPERATION),
        ({**OPERATION, "diff": ["+x", "+y"]}, {**OPERATION, "diff": "+x\n+y"}),
        ({"type": "delete_file", "path": "a.py"}, {"type": "delete_file", "path": "a.py", "diff": ""}),
    ],
)
def test_a_change_of_a_file_of_another_shape_is_the_same_change(
    arguments: dict[str, Any], operation: dict[str, Any]
) -> None:
    item = called("apply_patch", json.dumps(arguments))
    assert (item["operation"], item["status"]) == (operation, "completed")


@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("local_shell", '{"command": [["ls"]], "timeout": 1}'),
        ("local_shell", '{"command": ""}'),
        ("shell", "ls -l"),
        ("shell", '{"command": [], "workdir": "/"}'),
        ("apply_patch", '{"patch": "*** Begin Patch"}'),
        ("apply_patch", '{"path": "a.py", "diff": "+x"}'),
        ("apply_patch", '{"type": "update_file", "path": "a.py"}'),
    ],
)
def test_a_call_without_anything_to_run_is_incomplete(kind: str, arguments: str) -> None:
    assert called(kind, arguments)["status"] == "incomplete"
