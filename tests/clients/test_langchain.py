"""LangChain's OpenAI client: what agents are mostly written with.  ``make conformance`` installs it."""

import json
from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
from pydantic import BaseModel  # noqa: E402


class Trip(BaseModel):
    """Where to, and for how long."""

    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def model(url: str, **fields: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model="demo", temperature=0, max_tokens=90, max_retries=0, **fields
    )


def test_chat_and_stream_say_the_same(url: str) -> None:
    whole = model(url).invoke([("system", "Be brief."), ("user", "Write a function.")])
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(model(url, stream_usage=True).stream([("system", "Be brief."), ("user", "Write a function.")]))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert (
        sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata)
        == (whole.usage_metadata["output_tokens"])
    )


@pytest.mark.parametrize("strict", [None, True])
def test_tools_are_called_and_answered(url: str, strict: bool | None) -> None:
    bound = model(url).bind_tools([weather], tool_choice="required", parallel_tool_calls=False, strict=strict)
    answer = bound.invoke("What is the weather?")
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Paris", "Oslo")
    merged = None
    for piece in bound.stream("What is the weather?"):
        merged = piece if merged is None else merged + piece
    assert [(one["name"], one["args"]) for one in merged.tool_calls] == [(call["name"], call["args"])]
    # Where it is not strict, a call may have other arguments besides.
    result = {"role": "tool", "tool_call_id": call["id"], "content": weather(call["args"]["city"])}
    free = model(url).bind_tools([weather], strict=strict)
    assert free.invoke([("user", "What is the weather?"), answer, result]).usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_parsed(url: str, method: str) -> None:
    structured = model(url, seed=1).with_structured_output(Trip, method=method, include_raw=True)
    answer = structured.invoke("A trip, please.")
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], Trip)


def test_an_agents_format_beside_its_tools(url: str) -> None:
    bound = model(url).bind_tools([weather], response_format=Trip, strict=True, parallel_tool_calls=False)
    answer = bound.invoke("A trip, please.")
    if answer.tool_calls:
        assert answer.tool_calls[0]["args"]["city"] in ("Paris", "Oslo")
    else:
        assert Trip(**json.loads(answer.content))


def test_the_responses_api(url: str) -> None:
    answer = model(url, use_responses_api=True).invoke("Write a function.")
    assert answer.text
    pieces = list(model(url, use_responses_api=True).stream("Write a function."))
    assert "".join(piece.text for piece in pieces) == answer.text


def test_log_probabilities(url: str) -> None:
    answer = model(url, logprobs=True, top_logprobs=2).invoke("Write a function.")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]


def test_embeddings(url: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=url, api_key="none", model="demo", check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["def add(a, b):", "import os"])
    assert len(vectors) == 2
    assert embeddings.embed_query("import os") == pytest.approx(vectors[1], abs=1e-5)
