"""Pydantic AI: agents whose answers are objects.  ``make conformance`` installs it."""

from typing import Any, Literal

import pytest

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
from pydantic import BaseModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

SETTINGS = {"temperature": 0, "max_tokens": 60}


class Trip(BaseModel):
    """Where to."""

    city: Literal["Paris", "Oslo"]


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, url: str) -> Any:
    return request.param("demo", provider=OpenAIProvider(base_url=url, api_key="none"))


async def test_text_whole_and_streamed(model: Any) -> None:
    agent = pydantic_ai.Agent(model, model_settings=SETTINGS)
    whole = await agent.run("Write a function.")
    async with agent.run_stream("Write a function.") as stream:
        assert whole.output == await stream.get_output() != ""


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_an_object_is_the_answer(model: Any, kind: str) -> None:
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, kind)(Trip), model_settings=SETTINGS)
    assert agent.run_sync("A trip, please.").output.city in ("Paris", "Oslo")
