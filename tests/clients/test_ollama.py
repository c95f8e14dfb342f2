"""Ollama's own client.  ``make conformance`` installs it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import CITIES, TRIP_SCHEMA

ollama = pytest.importorskip("ollama", reason="ollama is not installed: make conformance")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

HI = [{"role": "user", "content": "Write a function."}]
GREEDY = {"temperature": 0, "num_predict": 40}


@pytest.fixture
def client(root: str) -> Iterator[Any]:
    with ollama.Client(host=root) as client:
        yield client


def test_answers_and_streams_say_the_same(client: Any) -> None:
    whole = client.chat("demo", HI, options=GREEDY)
    parts = list(client.chat("demo", HI, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content != ""
    assert parts[-1].done
    assert parts[-1].eval_count == whole.eval_count == 40
    text = client.generate("demo", "def f", options=GREEDY, raw=True).response
    assert (
        "".join(part.response for part in client.generate("demo", "def f", options=GREEDY, raw=True, stream=True))
        == text
    )


def test_a_schema_is_followed(client: Any) -> None:
    answer = client.chat("demo", HI, format=TRIP_SCHEMA, options={"temperature": 0})
    assert any(city in answer.message.content for city in CITIES)


def test_models_are_listed_and_shown(client: Any) -> None:
    (model,) = client.list().models
    assert client.show(model.model).capabilities == ["completion", "tools"]
    assert client.ps().models[0].model == model.model
    assert len(client.embed("demo", ["a", "b"]).embeddings) == 2


def test_what_cannot_be_done_is_an_error(client: Any) -> None:
    for call in (lambda: client.chat("other", HI), lambda: client.pull("demo")):
        with pytest.raises(ollama.ResponseError):
            call()
