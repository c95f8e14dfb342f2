"""OpenAI's agents library: its loop of calls and results, over chat and over responses.  ``make conformance``."""

from typing import Any, Literal

import pytest

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
import openai  # noqa: E402
from pydantic import BaseModel  # noqa: E402

agents.set_tracing_disabled(True)


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, url: str) -> Any:
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    return kinds[request.param](model="demo", openai_client=client)


def settings(**fields: Any) -> Any:
    return agents.ModelSettings(temperature=0, max_tokens=60, **fields)


class Trip(BaseModel):
    """Where to.  An answer that ends by itself: the library takes one that is cut off for an error."""

    city: Literal["Paris", "Oslo"]


async def test_an_agent_answers(model: Any) -> None:
    agent = agents.Agent(
        name="demo", instructions="Be brief.", model=model, output_type=Trip, model_settings=settings()
    )
    result = await agents.Runner.run(agent, "A trip, please.")
    streamed = agents.Runner.run_streamed(agent, "A trip, please.")
    async for _ in streamed.stream_events():
        pass
    assert result.final_output == streamed.final_output


def test_an_agent_calls_a_function(model: Any) -> None:
    called = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather in a city."""
        called.append(city)
        return f"rain in {city}"

    agent = agents.Agent(
        name="demo",
        model=model,
        tools=[weather],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )
    result = agents.Runner.run_sync(agent, "What is the weather?")
    assert len(called) == 1
    assert result.final_output == f"rain in {called[0]}"
