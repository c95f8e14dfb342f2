"""Log probabilities of tokens that the request names, as each endpoint gives them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.engine_server import EngineServer
from tests.server.http_client import ask

PROMPT = "def add(a, b):\n"
NAMED = [300, 5, 17]


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    with EngineServer(model={"name": "demo"}) as server:
        yield server


def post(served: EngineServer, path: str, **fields: Any) -> Any:
    return ask(served.port, "POST", path, {"model": "demo", "temperature": 0, "max_tokens": 4, **fields})


def test_every_endpoint_gives_those_of_the_same_tokens(served: EngineServer) -> None:
    by_id = {"logprob_token_ids": NAMED, "return_tokens_as_token_ids": True}
    completion = post(served, "/v1/completions", prompt=PROMPT, logprobs=0, **by_id).json["choices"][0]["logprobs"]
    expected = [[told[f"token_id:{one}"] for one in NAMED] for told in completion["top_logprobs"]]
    every = zip(completion["top_logprobs"], completion["tokens"], completion["token_logprobs"], strict=True)
    for told, token, value in every:
        assert told[token] == value
        assert set(told) == {token, *(f"token_id:{one}" for one in NAMED)}
    assert all(math.exp(value) <= 1 for values in expected for value in values)

    native = {"text": PROMPT, "return_logprob": True, "token_ids_logprob": NAMED}
    params = {"temperature": 0, "max_new_tokens": 4}
    for fields in (native, native | {"text": [PROMPT] * 2, "token_ids_logprob": [NAMED, [1]]}):
        answer = ask(served.port, "POST", "/generate", {**fields, "sampling_params": params}).json
        info = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
        listed = info["output_token_ids_logprobs"]
        assert [[token_id for _, token_id, _ in entries] for entries in listed] == [NAMED] * 4
        assert [[value for value, _, _ in entries] for entries in listed] == [
            pytest.approx(values, abs=1e-4) for values in expected
        ]
        assert "output_top_logprobs" not in info

    none = native | {"token_ids_logprob": [], "sampling_params": params}
    assert "output_token_ids_logprobs" not in ask(served.port, "POST", "/generate", none).json["meta_info"]

    messages = [{"role": "user", "content": "add"}]
    chat = post(served, "/v1/chat/completions", messages=messages, logprobs=True, **by_id)
    for entry in chat.json["choices"][0]["logprobs"]["content"]:
        assert [one["token"] for one in entry["top_logprobs"]] == [f"token_id:{one}" for one in NAMED]


def test_processed_ones_are_those_that_tokens_are_drawn_by(served: EngineServer) -> None:
    asked = {"prompt": PROMPT, "logprobs": 3, "logit_bias": {"300": 100}}
    drawn = post(served, "/v1/completions", processed_logprobs=True, **asked).json["choices"][0]["logprobs"]
    assert drawn["token_logprobs"] == pytest.approx([0.0] * 4, abs=1e-6)
    own = post(served, "/v1/completions", **asked).json["choices"][0]["logprobs"]
    assert own["token_logprobs"][0] < -5.0

    cut = {"prompt": PROMPT, "logprobs": 3, "processed_logprobs": True, "temperature": 1, "top_k": 1, "seed": 1}
    listed = post(served, "/v1/completions", **cut).json["choices"][0]["logprobs"]["top_logprobs"]
    assert [sorted(one.values()) for one in listed] == [[-9999.0, -9999.0, 0.0]] * 4

    refused = post(served, "/v1/completions", echo=True, processed_logprobs=True, **asked)
    assert (refused.status, refused.error["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": PROMPT}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": PROMPT, "best_of": 2}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 2}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 0, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 0, "logprob_token_ids": [1 << 20]}, "logprob_token_ids"),
        ("/generate", {"text": PROMPT}, "token_ids_logprob"),
        ("/generate", {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 1}, "token_ids_logprob"),
        ("/generate", {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0}, "token_ids_logprob"),
        ("/generate", {"text": PROMPT, "return_logprob": True, "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ("/generate", {"text": [PROMPT], "return_logprob": True, "token_ids_logprob": [[1], 2]}, "token_ids_logprob"),
    ],
)
def test_what_cannot_be_given_is_refused(served: EngineServer, path: str, fields: dict[str, Any], param: str) -> None:
    reply = ask(served.port, "POST", path, {"model": "demo", param: NAMED, **fields})
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


def test_scores_of_labels_are_the_probabilities_of_tokens_after_a_query_and_an_item(served: EngineServer) -> None:
    items = ["    return a", "    import numpy"]
    asked = {"query": PROMPT, "items": items, "label_token_ids": [*NAMED, 5], "model": "default"}
    told = post(served, "/v1/score", **asked).json
    assert told["object"] == "scoring"
    assert told["model"] == "demo"
    assert told["usage"]["prompt_tokens"] > 0
    expected = []
    for item in items:
        named = {"logprobs": 0, "logprob_token_ids": NAMED, "return_tokens_as_token_ids": True, "max_tokens": 1}
        choice = post(served, "/v1/completions", prompt=PROMPT + item, **named).json["choices"][0]
        (top,) = choice["logprobs"]["top_logprobs"]
        expected.append([math.exp(top[f"token_id:{one}"]) for one in (*NAMED, 5)])
    assert told["scores"] == [pytest.approx(values, rel=1e-4) for values in expected]
    among = post(served, "/v1/score", **asked, apply_softmax=True).json["scores"]
    assert among == [pytest.approx([one / sum(values) for one in values], rel=1e-4) for values in expected]

    tokens = [post(served, "/tokenize", prompt=text).json["tokens"] for text in (PROMPT, items[0])]
    turned = {"query": tokens[0], "items": tokens[1:], "label_token_ids": NAMED, "item_first": True}
    (scores,) = post(served, "/v1/score", **turned).json["scores"]
    whole = post(served, "/v1/score", query=[], items=[tokens[1] + tokens[0]], label_token_ids=NAMED).json["scores"]
    assert [scores] == [pytest.approx(one, rel=1e-4) for one in whole]


def test_a_name_that_stands_for_any_model_is_the_served_one(served: EngineServer) -> None:
    for name in ("default", "default/not-specified"):
        assert post(served, "/v1/completions", model=name, prompt=PROMPT).status == 200
    assert post(served, "/v1/completions", model="Default", prompt=PROMPT).status == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1 << 20]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"items": ["a"] * 257}, "items"),
        ({"items": ["a"] * 100_000, "query": "a" * 1_000_000}, "items"),  # 100 GB, were they joined
        ({"items": ["a"] * 20, "query": "a" * 1_000_000}, "items"),
        ({"items": [""], "query": ""}, "items"),
        ({"query": None}, "query"),
        ({"items": None}, "items"),
        ({"model": "another"}, "model"),
        ({"label_token_ids": None}, "model"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused_by_name(
    served: EngineServer, fields: dict[str, Any], param: str
) -> None:
    reply = post(served, "/v1/score", **{"query": PROMPT, "items": ["a"], "label_token_ids": NAMED, **fields})
    assert (reply.status, reply.json["error"]["param"]) == (404 if "model" in fields else 400, param), reply.body
