"""Tokens that may be picked and words that must not be, and prompts of which only the end is read."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.engine_server import EngineServer
from tests.server.http_client import ask

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    with EngineServer(model={"name": "demo"}) as server:
        yield server


def complete(served: EngineServer, prompt: Any = PROMPT, **fields: Any) -> Any:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 24, "return_token_ids": True, **fields}
    reply = ask(served.port, "POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_only_the_allowed_tokens_are_picked(served: EngineServer, temperature: float) -> None:
    allowed = sorted(set(complete(served)["token_ids"]))[:5]
    answer = complete(served, allowed_token_ids=allowed, temperature=temperature, seed=1)
    assert len(answer["token_ids"]) == 24
    assert set(answer["token_ids"]) <= set(allowed)


def test_a_grammar_holds_among_the_allowed_tokens(served: EngineServer) -> None:
    a, b = (ask(served.port, "POST", "/tokenize", {"prompt": text}).json["tokens"][-1] for text in "ab")
    assert complete(served, guided_regex="[abc]{6}", allowed_token_ids=[a, b, 0])["text"].strip("ab") == ""
    assert complete(served, guided_regex="b{3}", allowed_token_ids=[a, b, 0])["text"] == "bbb"


def test_a_bad_word_is_not_spelt(served: EngineServer) -> None:
    plain = complete(served)
    for word in plain["text"].split()[:3]:
        spelt = ask(served.port, "POST", "/tokenize", {"prompt": word}).json["tokens"]
        assert word not in complete(served, bad_words=[word])["text"].split(), spelt
    # Of several tokens only the last one is held back, and only behind the others.
    first, second = plain["token_ids"][:2]
    together = ask(served.port, "POST", "/detokenize", {"tokens": [first, second]}).json["prompt"]
    if ask(served.port, "POST", "/tokenize", {"prompt": together.strip()}).json["tokens"] == [first, second]:
        banned = complete(served, bad_words=[together])["token_ids"]
        assert (banned[0], banned[1] != second) == (first, True)


def test_only_the_end_of_a_prompt_is_read(served: EngineServer) -> None:
    ids = ask(served.port, "POST", "/tokenize", {"prompt": PROMPT}).json["tokens"]
    expected = complete(served, prompt=ids[-3:])["token_ids"]
    for prompt in (PROMPT, ids):
        answer = complete(served, prompt=prompt, truncate_prompt_tokens=3, echo=True)
        assert (answer["prompt_token_ids"], answer["token_ids"]) == (ids[-3:], expected)
        end = ask(served.port, "POST", "/detokenize", {"tokens": ids[-3:]}).json["prompt"]
        assert answer["text"].startswith(end)
    assert complete(served, prompt=PROMPT, truncate_prompt_tokens=-1)["prompt_token_ids"] == ids


def test_the_end_of_a_text_is_read_however_long_it_is(served: EngineServer) -> None:
    expected = complete(served, truncate_prompt_tokens=3)
    answer = complete(served, prompt="x " * 100_000 + PROMPT, truncate_prompt_tokens=3)
    assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
    assert answer["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1 << 20]},
        {"bad_words": ["  "]},
        {"bad_words": ["x"] * 129},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 1 << 20},
    ],
)
def test_what_cannot_be_limited_is_refused(served: EngineServer, fields: dict[str, Any]) -> None:
    reply = ask(served.port, "POST", "/v1/completions", {"model": "demo", "prompt": "x", **fields})
    assert (reply.status, reply.error["param"]) == (400, *fields)


def test_no_token_left_is_an_error_of_that_request(served: EngineServer) -> None:
    body = {"model": "demo", "prompt": "x", "guided_regex": "abc", "allowed_token_ids": [0]}
    assert ask(served.port, "POST", "/v1/completions", body).error["code"] == "grammar_failed"
