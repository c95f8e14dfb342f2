"""LlamaIndex, by its class for servers that speak OpenAI's API.  ``make conformance`` installs it."""

from typing import Any, Literal

import pytest

like = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402


def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@pytest.fixture
def model(url: str) -> Any:
    return like.OpenAILike(
        model="demo",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=512,
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )


def test_chat_and_stream_say_the_same(model: Any) -> None:
    messages = [ChatMessage(role="user", content="Write a function.")]
    whole = model.chat(messages)
    assert whole.message.content
    assert "".join(piece.delta or "" for piece in model.stream_chat(messages)) == whole.message.content


def test_text_is_completed(url: str) -> None:
    model = like.OpenAILike(model="demo", api_base=url, api_key="none", max_tokens=8, temperature=0)
    assert model.complete("def add(a, b):\n").text


def test_a_tool_is_called(model: Any) -> None:
    tool = FunctionTool.from_defaults(weather)
    answer = model.chat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs["city"] in ("Paris", "Oslo")) == ("weather", True)
