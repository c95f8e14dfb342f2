"""Anthropic's own client, by which coding agents talk.  ``make conformance`` installs it."""

from typing import Any

import pytest

from tests.clients.conftest import CITIES, TRIP_SCHEMA

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

REQUEST: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 60,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "Write a function."}],
}
TOOL = {"name": "weather", "description": "The weather in a city.", "input_schema": TRIP_SCHEMA}


@pytest.fixture
def client(root: str) -> Any:
    return anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)


def test_messages_and_streams_say_the_same(client: Any) -> None:
    whole = client.messages.create(**REQUEST)
    assert (whole.role, whole.type, whole.content[0].type) == ("assistant", "message", "text")
    assert 0 < whole.usage.output_tokens <= 60
    with client.messages.stream(**REQUEST) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_tool_is_called_and_answered(client: Any) -> None:
    asked = {**REQUEST, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    answer = client.messages.create(**asked)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert call.input["city"] in CITIES
    with client.messages.stream(**asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert (streamed.name, streamed.input) == ("weather", call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(**{**REQUEST, "messages": REQUEST["messages"] + turns, "tools": [TOOL]})
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens > answer.usage.input_tokens


def test_tokens_are_counted_and_errors_keep_their_kind(client: Any) -> None:
    counted = client.messages.count_tokens(model="demo", messages=REQUEST["messages"])
    assert counted.input_tokens == client.messages.create(**REQUEST).usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**REQUEST, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**{**REQUEST, "extra_body": {"temperature": -1}})
