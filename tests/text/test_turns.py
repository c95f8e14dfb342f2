"""Messages as Python programs write them: everything a template may show is read, and what is none is refused."""

from typing import Any

import pytest

from engine.text.turns import read_turn
from engine.types.errors import RequestError
from engine.types.prompt import ChatTurn, ToolCall

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_what_a_message_says_comes_through() -> None:
    assert read_turn({"role": "user", "content": "hi", "name": "Ann"}) == ChatTurn("user", "hi", name="Ann")
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    assert read_turn(answer) == ChatTurn("tool", "3", tool_call_id="call_1")
    assert read_turn({"role": "assistant", "content": "3", "reasoning": "1 + 2"}).reasoning == "1 + 2"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_a_call_needs_no_content(arguments: object) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    turn = read_turn({"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]})
    assert turn == ChatTurn("assistant", "", reasoning="hm", tool_calls=(ToolCall("call_1", "add", '{"a":1}'),))


class Loud(str):
    def __str__(self) -> str:
        raise AssertionError("asked for its text")


def test_a_text_of_another_class_is_its_text() -> None:
    turn = read_turn({"role": Loud("user"), "content": Loud("hi")})
    assert (type(turn.role), turn.content) == (str, "hi")


@pytest.mark.parametrize(
    "message",
    [
        None,
        "hi",
        {},
        {"role": "user"},
        {"role": 1, "content": "hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["hi"]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": object()}}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": "\ud800"}}}]},
    ],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        read_turn(message)
