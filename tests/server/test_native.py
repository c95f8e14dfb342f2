"""POST /generate with the demo model, beside /v1/completions: the same tokens, told in another way."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.server.engine_server import EngineServer
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import LiveServer

PROMPT = "def add(a, b):\n"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    with EngineServer(model={"name": "demo"}) as server:
        yield server


def generate(served: EngineServer, **fields: Any) -> Any:
    reply = ask(served.port, "POST", "/generate", {"sampling_params": GREEDY, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def complete(served: EngineServer, **fields: Any) -> Any:
    body = {"model": "demo", "temperature": 0, "max_tokens": 8, "return_token_ids": True, **fields}
    return ask(served.port, "POST", "/v1/completions", body).json


def same(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Log probabilities; which requests share a step may show in the last digits."""
    assert [one[1:] for one in found] == [one[1:] for one in expected]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-3)


def test_text_and_tokens_are_those_of_completions(served: EngineServer) -> None:
    answer = generate(served, text=PROMPT, rid="r1")
    (choice,) = complete(served, prompt=PROMPT)["choices"]
    assert (answer["text"], answer["output_ids"]) == (choice["text"], choice["token_ids"])
    info = answer["meta_info"]
    assert info["id"] == "r1"
    assert info["finish_reason"] == {"type": "length", "length": 8}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (len(choice["prompt_token_ids"]), 8)
    assert "output_token_logprobs" not in info
    assert generate(served, input_ids=choice["prompt_token_ids"])["output_ids"] == choice["token_ids"]


def test_prompts_and_choices_are_numbered_prompt_by_prompt(served: EngineServer) -> None:
    answers = generate(served, text=[PROMPT, "import"], sampling_params={**GREEDY, "n": 2})
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    first, second = generate(served, text=PROMPT)["text"], generate(served, text=["import"])[0]["text"]
    assert [answer["text"] for answer in answers] == [first, first, second, second]


def stream(served: EngineServer, **fields: Any) -> list[Any]:
    body = {"sampling_params": GREEDY, "stream": True, **fields}
    *events, done = ask(served.port, "POST", "/generate", body).events
    assert done == "[DONE]"
    return events


def test_an_event_of_a_stream_is_the_answer_so_far(served: EngineServer) -> None:
    request = {"text": [PROMPT, "import"], "return_logprob": True, "logprob_start_len": 0, "rid": "r"}
    whole, events = generate(served, **request), stream(served, **request)
    for index, answer in enumerate(whole):
        mine = [event for event in events if event["index"] == index]
        assert len(mine) > 2
        for event, later in pairwise(mine):
            assert later["text"].startswith(event["text"])
            assert later["output_ids"][: len(event["output_ids"])] == event["output_ids"]
            same(event["meta_info"]["input_token_logprobs"], answer["meta_info"]["input_token_logprobs"])
        last, info = mine[-1], answer["meta_info"]
        assert (last["text"], last["output_ids"]) == (answer["text"], answer["output_ids"])
        assert (last["meta_info"]["id"], info["id"]) == (f"r_{index}", f"r_{index}")
        same(last["meta_info"]["output_token_logprobs"], info["output_token_logprobs"])


def test_pieces_of_a_stream_add_up_where_they_are_asked_for(served: EngineServer) -> None:
    request = {"text": [PROMPT, "import"], "return_logprob": True, "logprob_start_len": 0}
    whole, events = generate(served, **request), stream(served, stream_output=True, **request)
    for index, answer in enumerate(whole):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["text"] for event in mine) == answer["text"]
        assert [token for event in mine for token in event["output_ids"]] == answer["output_ids"]
        info = answer["meta_info"]
        same(
            [one for event in mine for one in event["meta_info"]["output_token_logprobs"]],
            info["output_token_logprobs"],
        )
        (told,) = [event["meta_info"] for event in mine if "input_token_logprobs" in event["meta_info"]]
        same(told["input_token_logprobs"], info["input_token_logprobs"])
        assert [event["meta_info"]["finish_reason"] is None for event in mine] == [True] * (len(mine) - 1) + [False]
        assert mine[-1]["meta_info"]["completion_tokens"] == 8


def test_log_probabilities_of_prompt_and_output(served: EngineServer) -> None:
    logprobs = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    info = generate(served, text=PROMPT, logprob_start_len=0, **logprobs)["meta_info"]
    (choice,) = complete(served, prompt=PROMPT, echo=True, logprobs=2)["choices"]
    values = [*info["input_token_logprobs"], *info["output_token_logprobs"]]
    assert values[0][0] is None
    assert [value for value, _, _ in values[1:]] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert [text for _, _, text in values] == choice["logprobs"]["tokens"]
    assert [token for _, token, _ in values] == choice["prompt_token_ids"] + choice["token_ids"]
    assert info["input_top_logprobs"][0] is None
    assert {len(top) for top in info["input_top_logprobs"][1:] + info["output_top_logprobs"]} == {2}
    later = generate(served, text=PROMPT, logprob_start_len=3, **logprobs)["meta_info"]
    assert [one[1:] for one in later["input_token_logprobs"]] == [one[1:] for one in values[3 : len(values) - 8]]
    assert generate(served, text=PROMPT, **logprobs)["meta_info"]["input_token_logprobs"] == []


def test_scoring_generates_nothing(served: EngineServer) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0}
    answer = generate(served, text=PROMPT, sampling_params={"max_new_tokens": 0}, **asked)
    info = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], info["completion_tokens"]) == ("", [], 0)
    assert len(info["input_token_logprobs"]) == info["prompt_tokens"]


def test_stops_and_grammars(served: EngineServer) -> None:
    plain = generate(served, text=PROMPT)
    stop = plain["text"].split()[1]
    for trim in (False, True):
        answer = generate(served, text=PROMPT, sampling_params={**GREEDY, "stop": stop, "no_stop_trim": not trim})
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == plain["text"].partition(stop)[0] + ("" if trim else stop)
    token = plain["output_ids"][2]
    answer = generate(served, text=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [token]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    answer = generate(served, text=PROMPT, sampling_params={**GREEDY, "regex": "[ab]{3}"})
    assert answer["text"].strip("ab") == ""
    # It ended by the model's own end token, which is told as well.
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}


def test_every_prompt_may_have_parameters_of_its_own(served: EngineServer) -> None:
    params = [{**GREEDY, "max_new_tokens": count} for count in (2, 0, 5)]
    asked = {"return_logprob": [True, True, False], "logprob_start_len": [-1, 0, -1], "top_logprobs_num": [2, 0, 0]}
    prompts = [PROMPT, "import", PROMPT]
    answers = generate(served, text=prompts, sampling_params=params, rid=["a", "b", "c"], **asked)
    assert [len(one["output_ids"]) for one in answers] == [2, 0, 5]
    infos = [one["meta_info"] for one in answers]
    assert [one["id"] for one in infos] == ["a", "b", "c"]
    assert [len(one.get("input_token_logprobs", ())) for one in infos] == [0, infos[1]["prompt_tokens"], 0]
    assert ["output_token_logprobs" in one for one in infos] == [True, True, False]
    assert [len(top) for top in infos[0]["output_top_logprobs"]] == [2, 2]
    assert [one["finish_reason"]["length"] for one in infos] == [2, 0, 5]
    for answer, prompt, own in zip(answers, prompts, params, strict=True):
        assert answer["output_ids"] == generate(served, text=prompt, sampling_params=own)["output_ids"]


@pytest.mark.parametrize(
    "others, param",
    [({}, "sampling_params.json_schema"), ({"regex": "a"}, "sampling_params")],
)
def test_a_refused_grammar_of_one_prompt_is_named(served: EngineServer, others: dict[str, Any], param: str) -> None:
    params = [others, {"json_schema": '{"type": "strin"}'}]
    error = ask(served.port, "POST", "/generate", {"text": ["a", "b"], "sampling_params": params}).error
    assert (error["code"], error["param"]) == ("invalid_grammar", param)


def test_one_prompt_of_several_ends_by_its_name(live: LiveServer) -> None:
    with RawClient(live.port) as client:
        body = {"text": ["!hang", "!hang"], "rid": ["one", "two"], "sampling_params": {"n": 2}}
        client.send(http_bytes("POST", "/generate", json.dumps(body).encode()))
        assert live.wait_until(lambda: live.ingress.num_open == 4, 5)
        for name, left in (("two", 2), ("one", 0)):
            assert ask(live.port, "POST", "/abort_request", {"rid": name}).json["num_aborted"] == 1
            assert live.wait_until(lambda left=left: live.ingress.num_open == left, 5)
        assert [one["meta_info"]["id"] for one in client.read_reply().json] == ["one", "one", "two", "two"]


def test_members_that_are_not_set_ask_for_nothing(live: LiveServer) -> None:
    params = {"stop_regex": None, "custom_params": {}, "stream_interval": 1, "max_new_tokens": 1}
    assert ask(live.port, "POST", "/generate", {"text": "x", "sampling_params": params}).status == 200


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [1000]}, "input_ids"),
        ({"text": 1}, "text"),
        ({"text": "x" * 9000}, "text"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 1}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"sampling_seed": 1 << 63}}, "sampling_params.sampling_seed"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"sampling_params": {"regex": "a", "ignore_eos": True}}, "sampling_params.ignore_eos"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"unknown": 1}}, "sampling_params.unknown"),
        ({"sampling_params": 1}, "sampling_params"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["x", "y"], "sampling_params": [{"n": 2}, {}]}, "sampling_params.n"),
        ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"sampling_params": {"spaces_between_special_tokens": False}},
         "sampling_params.spaces_between_special_tokens"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"top_logprobs_num": 21}, "top_logprobs_num"),
        ({"lora_path": "x"}, "lora_path"),
        ({"temperature": 0}, "temperature"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"seed": 5}, "seed"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{}]}, "tools"),
        ({"session_params": {"id": "x"}}, "session_params"),
        ({"model": "other"}, "model"),
        ({"stream": 1}, "stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_by_name(live: LiveServer, body: dict[str, Any], param: str) -> None:
    given = {} if {"text", "input_ids"} & set(body) or not body else {"text": "x"}
    reply: Reply = ask(live.port, "POST", "/generate", {**given, **body})
    assert (reply.status, reply.error["param"]) == (404 if param == "model" else 400, param)


def test_a_failure_in_a_stream_is_an_event(live: LiveServer) -> None:
    *chunks, error, done = ask(live.port, "POST", "/generate", {"text": "!fail", "stream": True}).events
    assert chunks
    assert (error["error"]["code"], done) == ("numerical_error", "[DONE]")
    assert ask(live.port, "POST", "/generate", {"text": "!refuse", "stream": True}).error["param"] == "text"
