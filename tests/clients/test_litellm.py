"""LiteLLM, by which many programs talk to every server there is.  ``make conformance`` installs it."""

import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

MESSAGES = [{"role": "user", "content": "Write a function."}]


def schema() -> dict[str, Any]:
    """A new one each time: for some providers the library takes things out of what it is given."""
    return {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }


@pytest.fixture(params=["openai", "hosted_vllm"])
def target(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    return {"model": f"{request.param}/demo", "api_base": url, "api_key": "none", "max_retries": 0}


def complete(target: dict[str, Any], **fields: Any) -> Any:
    return litellm.completion(**target, **{"messages": MESSAGES, "max_tokens": 90, "temperature": 0, **fields})


def test_chat_and_stream_say_the_same(target: dict[str, Any]) -> None:
    whole = complete(target)
    assert whole.usage.completion_tokens > 0
    chunks = list(complete(target, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(target: dict[str, Any], stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema()}}
    answer = complete(target, tools=[tool], tool_choice="required", parallel_tool_calls=False, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=MESSAGES)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def test_structured_output(target: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema(), "strict": True}}
    answer = complete(target, response_format=form)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Oslo")


def test_text_completions_and_embeddings(target: dict[str, Any]) -> None:
    provider, _, name = target["model"].partition("/")
    text = litellm.text_completion(
        **{**target, "model": f"text-completion-openai/{name}" if provider == "openai" else target["model"]},
        prompt="def add(a, b):\n",
        max_tokens=8,
        temperature=0,
    )
    assert text.choices[0].text
    answer = litellm.embedding(**{**target, "model": f"openai/{name}"}, input=["def add(a, b):", "import os"])
    assert len(answer.data) == 2


def test_infinitys_dialect(root: str) -> None:
    asked = {"model": "infinity/demo", "api_base": f"{root}/infinity", "input": ["def add(a, b):", "import os"]}
    assert [len(one["embedding"]) for one in litellm.embedding(**asked, dimensions=8).data] == [8, 8]


def test_errors_keep_their_kind(target: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError) as refused:
        complete(target, temperature=-1)
    assert "temperature" in str(refused.value)
    with pytest.raises(litellm.NotFoundError):
        complete({**target, "model": target["model"].replace("demo", "other")})
