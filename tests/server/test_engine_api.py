"""The whole API with the demo model behind it, by the official client: what only a real engine can answer."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.server.engine_server import EngineServer
from tests.server.http_client import ask

MESSAGES = [{"role": "user", "content": "Write a function."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
REFUSED = {"type": "object", "properties": {"x": {"type": "array", "items": {"unevaluatedItems": False}}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    with EngineServer(model={"name": "demo"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: EngineServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = "def add(a, b):\n", **request: Any) -> Any:
    return client.completions.create(model="demo", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **request})


def chat(client: openai.OpenAI, **request: Any) -> Any:
    return client.chat.completions.create(
        model="demo", **{"messages": MESSAGES, "max_tokens": 60, "seed": 1, **request}
    )


# ---- completions ----------------------------------------------------------------------------


def test_echo_scores_the_prompt_as_generation_did(client: openai.OpenAI) -> None:
    first = complete(client, logprobs=2).choices[0]
    whole = complete(client, echo=True, logprobs=2, max_tokens=8).choices[0]
    assert whole.text == "def add(a, b):\n" + first.text
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.top_logprobs[0] is None
    assert whole.logprobs.token_logprobs[-8:] == pytest.approx(first.logprobs.token_logprobs, abs=1e-3)
    offsets = whole.logprobs.text_offset
    assert [whole.text[start:end] for start, end in zip(offsets, [*offsets[1:], None], strict=True)] == (
        whole.logprobs.tokens
    )


def test_offsets_stay_right_behind_characters_of_several_tokens(client: openai.OpenAI) -> None:
    prompt = "# é🎭 x = δ + 1\n"
    request = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3}
    (whole,) = complete(client, **request).choices
    chunks = [chunk.choices[0].logprobs for chunk in complete(client, stream=True, **request)]
    told = [(token, at) for token, at in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True)]
    readable = [(token, at) for token, at in told if "\ufffd" not in token]
    assert len(readable) < len(told), "some tokens are parts of characters"
    assert [whole.text[at : at + len(token)] for token, at in readable] == [token for token, _ in readable]
    assert [at for logprobs in chunks if logprobs for at in logprobs.text_offset] == whole.logprobs.text_offset
    by_id = complete(client, extra_body={"return_tokens_as_token_ids": True}, **request).choices[0].logprobs
    assert by_id.text_offset == whole.logprobs.text_offset


def test_scoring_generates_nothing(client: openai.OpenAI) -> None:
    whole = complete(client, logprobs=1).choices[0]
    scored = complete(client, prompt="def add(a, b):\n" + whole.text, echo=True, logprobs=1, max_tokens=0)
    (choice,) = scored.choices
    assert choice.text == "def add(a, b):\n" + whole.text
    assert choice.finish_reason == "length"
    assert scored.usage.completion_tokens == 0
    assert len(choice.logprobs.tokens) == scored.usage.prompt_tokens
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])


def test_an_echoed_stream_says_what_the_answer_says(client: openai.OpenAI) -> None:
    request = {"echo": True, "logprobs": 1, "prompt": ["import os", "x = "]}
    whole = complete(client, **request)
    texts, tokens, offsets = ["", ""], [[], []], [[], []]
    for chunk in complete(client, stream=True, **request):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens
                offsets[choice.index] += choice.logprobs.text_offset
            assert "".join(choice.logprobs.tokens) == choice.text, "an event has the text of its tokens"
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset


def test_the_best_are_the_likeliest(client: openai.OpenAI) -> None:
    request = {"temperature": 1.0, "seed": 7}
    every = complete(client, n=6, logprobs=0, **request)
    best = complete(client, n=2, best_of=6, **request)
    ranked = sorted(every.choices, key=lambda choice: -np.mean(choice.logprobs.token_logprobs))
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == every.usage.completion_tokens


@pytest.mark.parametrize(
    "request_, param",
    [
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"guided_regex": "a", "ebnf": "b"}}, "ebnf"),
        ({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_what_cannot_be_completed_is_refused(client: openai.OpenAI, request_: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **request_)
    assert refused.value.param == param


def test_cached_tokens_are_told_and_salts_keep_them_apart(client: openai.OpenAI) -> None:
    prompt = "# a prompt of some length, so that it fills several pages of the cache\n" * 3

    def cached(salt: str) -> int:
        usage = complete(client, prompt=prompt, extra_body={"cache_salt": salt}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") == cached("b") > 16


def test_sampling_fields_do_what_they_say(client: openai.OpenAI) -> None:
    plain = complete(client, max_tokens=20).choices[0].text
    assert complete(client, max_tokens=20, seed=5, temperature=1).choices[0].text != plain
    (first, *_) = ask_tokens(client, plain)
    banned = complete(client, max_tokens=20, logit_bias={str(first): -100}).choices[0].text
    assert banned != plain
    stopped = complete(client, max_tokens=20, stop=[plain[4:9]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (plain[: plain.index(plain[4:9])], "stop")
    penal = complete(client, max_tokens=40, extra_body={"repetition_penalty": 1.8}).choices[0].text
    assert penal != complete(client, max_tokens=40).choices[0].text
    ended = complete(client, max_tokens=20, extra_body={"stop_token_ids": [first]}).choices[0]
    assert (ended.text, ended.model_extra["stop_reason"]) == ("", first)


def ask_tokens(client: openai.OpenAI, text: str) -> list[int]:
    port = client.base_url.port
    return ask(port, "POST", "/tokenize", {"prompt": text}).json["tokens"]


def test_token_ids_are_told_where_asked_for(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    prompt = "def add(a, b):\n"
    (choice,) = complete(client, prompt=prompt, logprobs=1, extra_body=extra).choices
    tokens = choice.model_extra["token_ids"]
    assert ask_tokens(client, prompt) == choice.model_extra["prompt_token_ids"]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in tokens]
    assert ask(client.base_url.port, "POST", "/detokenize", {"tokens": tokens}).json["prompt"] == choice.text
    streamed, prompts = [], []
    for chunk in complete(client, prompt=prompt, logprobs=1, stream=True, extra_body=extra):
        assert len(chunk.choices[0].model_extra["token_ids"]) == len(chunk.choices[0].logprobs.tokens)
        streamed += chunk.choices[0].model_extra["token_ids"]
        prompts += chunk.choices[0].model_extra.get("prompt_token_ids", [])
    assert (streamed, prompts) == (tokens, choice.model_extra["prompt_token_ids"])
    answer = chat(client, temperature=0, max_tokens=6, extra_body=extra)
    assert len(answer.choices[0].model_extra["token_ids"]) == answer.usage.completion_tokens
    assert len(answer.model_extra["prompt_token_ids"]) == answer.usage.prompt_tokens
    chunks = list(chat(client, temperature=0, max_tokens=6, stream=True, extra_body=extra))
    assert chunks[0].model_extra["prompt_token_ids"] == answer.model_extra["prompt_token_ids"]
    told = [token for chunk in chunks for token in chunk.choices[0].model_extra.get("token_ids", [])]
    assert told == answer.choices[0].model_extra["token_ids"]


# ---- structured output ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_its_schema(client: openai.OpenAI, stream: bool, temperature: float) -> None:
    answer = chat(client, response_format=FORMAT, stream=stream, temperature=temperature)
    if stream:
        text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
    else:
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content
    trip = json.loads(text)
    assert trip["city"] in ("Paris", "Oslo")
    assert 1 <= trip["days"] <= 9


@pytest.mark.parametrize(
    "extra, pattern",
    [
        ({"guided_json": SCHEMA}, r'\{\s*"city".*\}'),
        ({"guided_json": json.dumps(SCHEMA)}, r'\{\s*"city".*\}'),
        ({"json_schema": json.dumps(SCHEMA)}, r'\{\s*"city".*\}'),
        ({"guided_regex": "[ab]{3}[0-9]"}, "[ab]{3}[0-9]"),
        ({"regex": "[ab]{3}[0-9]"}, "[ab]{3}[0-9]"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
        ({"ebnf": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{\s*"city".*\}'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, r'\{\s*"city".*\}'),
        ({"response_format": {"type": "json_object", "schema": json.dumps(SCHEMA)}}, r'\{\s*"city".*\}'),
        ({"response_format": {"type": "json_object", "schema": {"enum": [["a"]]}}}, r'\[\s*"a"\s*\]'),
    ],
)
def test_every_name_of_a_grammar_is_followed(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    for answer in (
        complete(client, max_tokens=60, temperature=1, seed=3, extra_body=extra).choices[0].text,
        chat(client, extra_body=extra).choices[0].message.content,
    ):
        assert re.fullmatch(pattern, answer, re.DOTALL), answer


def test_a_response_follows_the_schema_of_its_object(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_object", "schema": SCHEMA}}
    answer = client.responses.create(model="demo", input="x", text=text, max_output_tokens=60, temperature=1)
    assert json.loads(answer.output_text)["city"] in ("Paris", "Oslo")
    assert answer.text.format.model_extra["schema"] == SCHEMA


@pytest.mark.parametrize("schema", [None, {}])
def test_an_object_whose_schema_asks_nothing_is_any_object(client: openai.OpenAI, schema: Any) -> None:
    for seed in range(3):
        extra = {"response_format": {"type": "json_object", "schema": schema}}
        answer = chat(client, max_tokens=12, temperature=1.5, seed=seed, extra_body=extra)
        assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, 1, "{", {"maximum": 1e400}])
def test_a_schema_of_an_object_that_cannot_be_followed_is_a_400(served: EngineServer, schema: Any) -> None:
    text = json.dumps({"type": "json_object", "schema": schema}).replace("Infinity", "1e400")
    for path, fields in (("/v1/completions", '"prompt": "x", "response_format"'),
                         ("/v1/responses", '"input": "x", "text": {"format"')):  # fmt: skip
        body = f'{{"model": "demo", {fields}: {text}{"}" * fields.count("{")}}}'
        reply = ask(served.port, "POST", path, body.encode())
        assert (reply.status, reply.error["code"]) == (400, "invalid_grammar"), reply.body


def test_a_schema_that_cannot_be_followed_is_a_400(client: openai.OpenAI) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "http://127.0.0.1/x"}, {"patternProperties": 1}):
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                chat(client, response_format=bad, stream=stream)
            assert refused.value.code == "invalid_grammar"


def test_an_answer_that_breaks_what_no_grammar_expresses_is_an_error_that_says_so(served: EngineServer) -> None:
    """Two items that can only be 1: the model cannot but repeat it."""
    ones = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    for schema, status in ((ones, 200), ({**ones, "uniqueItems": True}, 400)):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "demo", "messages": MESSAGES, "response_format": form}
        reply = ask(served.port, "POST", "/v1/chat/completions", body)
        assert reply.status == status, reply.body
    assert reply.error["code"] == "grammar_failed"
    assert "the value: uniqueItems" in reply.error["message"]


@pytest.mark.parametrize(
    "fields, param, place",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": REFUSED}}},
         "response_format", "properties.x.items: Unimplemented keys"),
        ({"tools": [{"type": "function", "function": {"name": name, "parameters": schema}}
                    for name, schema in (("f", SCHEMA), ("g", REFUSED))], "tool_choice": "required"},
         "tools", "function 'g': parameters.properties.x.items: Unimplemented keys"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<f"],
                              "structures": [{"begin": "<f>", "schema": REFUSED, "end": "</f>"}]}},
         "response_format", "tag '<f>': schema.properties.x.items: Unimplemented keys"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"],
            "tags": [{"begin": "<f>", "content": {"type": "json_schema"}, "end": "</f>"}]}}},
         "response_format.format.tags[0].content.json_schema", "required, but not given"),
        ({"structured_outputs": {"json": REFUSED}}, "structured_outputs.json", "properties.x.items"),
    ],
)  # fmt: skip
def test_a_refusal_says_which_field_which_function_and_which_part(
    served: EngineServer, fields: dict[str, Any], param: str, place: str
) -> None:
    for stream in (False, True):
        body = {"model": "demo", "messages": MESSAGES, "stream": stream, **fields}
        reply = ask(served.port, "POST", "/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert place in reply.error["message"]


OBJECT = {"type": "object", "required": ["x"]}


def in_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_object", "schema": OBJECT | {"properties": {"x": schema}}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a{1000000}"},
        {"guided_regex": "(a{1000}){1000}"},
        {"ebnf": 'root ::= ("a"{1000}){1000}'},
        {"guided_grammar": "start: /[a-z]{1000000}/"},
        in_schema({"type": "string", "pattern": "a{1000000}"}),
        in_schema({"type": "string", "minLength": 1000000}),
        in_schema({"anyOf": [{"type": "string", "minLength": 1000000}]}),
    ],
)
def test_what_repeats_a_million_times_is_a_400_and_nobody_waits_for_it(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    beside = complete(client, stream=True, max_tokens=100, extra_body={"ignore_eos": True})
    for ask_for in (chat, complete):
        with pytest.raises(openai.BadRequestError, match="1000000 times; at most 20000") as refused:
            ask_for(client, extra_body=fields)
        assert refused.value.code == "invalid_grammar"
    assert [chunk.choices[0].finish_reason for chunk in beside][-1] == "length"


# ---- tools ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_come_comes(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = chat(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, stream=stream, max_tokens=90)
    if stream:
        calls = [c for chunk in answer for one in chunk.choices for c in one.delta.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(call.function.arguments for call in calls)
    else:
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Paris", "Oslo")


def test_a_response_calls_as_well(client: openai.OpenAI) -> None:
    flat = {"type": "function", **TOOL["function"], "strict": True}
    request = {"model": "demo", "input": "hello", "tools": [flat], "tool_choice": "required", "temperature": 0}
    answer = client.responses.create(**request, parallel_tool_calls=False, max_output_tokens=90)
    (call,) = answer.output
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    text = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
    answer = client.responses.create(model="demo", input="hello", text=text, max_output_tokens=60)
    assert json.loads(answer.output_text)["city"] in ("Paris", "Oslo")


def test_an_answer_goes_on_where_the_last_message_ends(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "def add(a, b):\n    return a"}]
    extra = {"continue_final_message": True}
    answer = chat(client, messages=messages, temperature=0, max_tokens=5, extra_body=extra)
    port = client.base_url.port
    tokens = ask(port, "POST", "/tokenize", {"messages": messages, **extra}).json["tokens"]
    same = complete(client, prompt=tokens, max_tokens=5, temperature=0)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage.prompt_tokens == len(tokens)


# ---- embeddings and tokens ------------------------------------------------------------------


def test_embeddings_of_every_form(client: openai.OpenAI) -> None:
    def vectors(**request: Any) -> np.ndarray:
        answer = client.embeddings.create(model="demo", **request)
        return np.array([entry.embedding for entry in answer.data])

    texts = ["def add(a, b):", "import numpy as np"]
    both = vectors(input=texts)
    assert np.linalg.norm(both, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors(input=texts, encoding_format="float") == pytest.approx(both, abs=1e-6)
    assert vectors(input=ask_tokens(client, texts[0]))[0] == pytest.approx(both[0], abs=1e-5)
    assert both[0] @ vectors(input=texts[0])[0] == pytest.approx(1.0, abs=1e-5)
    assert both[0] @ both[1] < 0.999
    short = vectors(input=texts, dimensions=16)
    assert short.shape == (2, 16)
    assert np.linalg.norm(short, axis=1) == pytest.approx(1.0, abs=1e-5)
    mean = vectors(input=texts, extra_body={"pooling": "mean"})
    assert abs(mean[0] @ both[0]) < 0.999
    usage = client.embeddings.create(model="demo", input=texts).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(len(ask_tokens(client, text)) for text in texts)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="demo", input=texts, dimensions=100_000)
    assert refused.value.param == "dimensions"


def test_tokens_and_text_are_each_others_inverse(served: EngineServer) -> None:
    text = "def f(x):\n    return 'é🎭'\n"
    for prefix in ("", "/v1"):
        tokens = ask(served.port, "POST", f"{prefix}/tokenize", {"prompt": text, "return_token_strs": True}).json
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert tokens["max_model_len"] == served.system.max_len
        assert ask(served.port, "POST", f"{prefix}/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}
    chat_tokens = ask(served.port, "POST", "/tokenize", {"messages": MESSAGES, "tools": [TOOL]}).json["tokens"]
    shown = ask(served.port, "POST", "/detokenize", {"tokens": chat_tokens}).json["prompt"]
    assert "weather(city, days): Weather." in shown
    assert shown.endswith("<|im_start|>assistant\n")
    assert ask(served.port, "POST", "/tokenize", {"prompt": ""}).json["tokens"] == []


def test_the_tokenizer_tells_its_special_tokens_and_its_template(served: EngineServer) -> None:
    info = ask(served.port, "GET", "/tokenizer_info").json
    assert info["eos_token"] in served.system.codec.named_tokens.values()
    assert "<|im_start|>" in info["chat_template"]


def test_a_prompt_is_counted_as_it_is_answered(served: EngineServer) -> None:
    body = {"model": "demo", "messages": MESSAGES, "system": "s", "tools": [{"name": "f", "input_schema": SCHEMA}]}
    counted = ask(served.port, "POST", "/v1/messages/count_tokens", body).json["input_tokens"]
    usage = ask(served.port, "POST", "/v1/messages", {**body, "max_tokens": 1}).json["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert counted == sum(usage[name] for name in parts) > 20
    refused = ask(served.port, "POST", "/v1/messages/count_tokens", {**body, "messages": []})
    assert (refused.status, refused.json["type"]) == (400, "error")


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt"),
        ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 100_000},
         "max_completion_tokens"),
        ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "max_tokens": 100_000}, "max_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 100_000}}, "sampling_params.max_new_tokens"),
        ("/detokenize", {"tokens": [1 << 30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/v1/embeddings", {"model": "demo", "input": []}, "input"),
        ("/v1/embeddings", {"model": "demo", "input": ["x"] * 2049}, "input"),
        ("/v1/embeddings", {"model": "demo", "input": ""}, "input"),
        ("/v1/embeddings", {"model": "demo", "input": "x" * 100_000}, "input"),
        ("/v1/embeddings", {"model": "demo", "input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"model": "demo", "input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"model": "demo", "input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"model": "other", "input": "x"}, "model"),
    ],
)  # fmt: skip
def test_wrong_tokens_and_inputs_are_refused(served: EngineServer, path: str, body: Any, param: str) -> None:
    reply = ask(served.port, "POST", path, body)
    assert reply.status == (404 if param == "model" else 400)
    assert reply.error["param"] == param


def test_nothing_is_left_behind(served: EngineServer, client: openai.OpenAI) -> None:
    complete(client)
    stats = ask(served.port, "GET", "/stats").json
    assert (stats["requests"]["running"], stats["requests"]["waiting"], stats["pages"]["used"]) == (0, 0, 0)
