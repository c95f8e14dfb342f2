"""Instructor: answers as objects, by three of the ways in which it asks for them.  ``make conformance``."""

from typing import Literal

import pytest

instructor = pytest.importorskip("instructor", reason="instructor is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
import openai  # noqa: E402
from pydantic import BaseModel  # noqa: E402


class Trip(BaseModel, extra="forbid"):
    """Where to, and nothing else, which any model can be held to."""

    city: Literal["Paris", "Oslo"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_an_object_is_the_answer(url: str, mode: str) -> None:
    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "A trip, please."}],
        response_model=Trip,
        max_retries=0,
        temperature=0,
        max_tokens=60,
    )
    assert answer.city in ("Paris", "Oslo")
