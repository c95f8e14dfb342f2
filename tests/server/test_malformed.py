"""Hostile and broken requests: each gets a 4xx in the API's words, soon, and a healthy client beside them none.

The bodies are made from a table of fields, each with the JSON that is wrong for it.
"""

import gzip
import json
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from server.http.body import ROUTED_TYPE
from tests.figures import Figure
from tests.pace import far
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer

HUGE = "9" * 5000
DEEP = "[" * 100_000
NUMBERS = ['"1"', "true", "[]", "{}", "NaN", "Infinity", "1e999", HUGE, "-1e300"]
INTEGERS = ['"1"', "true", "[]", "{}", "1.5", "NaN", "1e999", HUGE, str(1 << 64)]
FLAGS = ["1", '"true"', "[]", "NaN"]
STRINGS = ["1", "[]", "{}", '"\\ud800"', "NaN"]

ANY_FIELDS: dict[str, list[str]] = {
    "model": [*STRINGS, "null", '""', '"../../etc/passwd"', '"fake/model-1 "'],
    "temperature": [*NUMBERS, "-0.1", "100.1"],
    "top_p": [*NUMBERS, "1.01", "-1"],
    "min_p": [*NUMBERS, "-0.01", "1.01"],
    "repetition_penalty": [*NUMBERS, "0", "-1", "11"],
    "presence_penalty": [*NUMBERS, "2.1", "-2.1"],
    "frequency_penalty": [*NUMBERS, "2.1", "-2.1"],
    "top_k": [*INTEGERS, "-2"],
    "n": [*INTEGERS, "0", "-1", "257", "1000000"],
    "max_tokens": [*INTEGERS, "0", "-1"],
    "min_tokens": [*INTEGERS, "-1"],
    "seed": [*INTEGERS, str((-1 << 63) - 1), str(1 << 63)],
    "priority": [*INTEGERS, str(1 << 31)],
    "logit_bias": ["[]", '"x"', "1", '{"1": "2"}', '{"x": 1}', '{"-1": 1}', '{"1000": 1}', '{"1": 101}', '{"1": NaN}',
                   '{"1": 1e999}', '{"1.0": 1}', '{"' + HUGE + '": 1}'],
    "stop": ["1", "{}", "[1]", '""', '[""]', json.dumps(["x"] * 17), json.dumps("x" * 1025), '["\\udfff"]'],
    "stop_token_ids": ["1", '"1"', '["1"]', "[1.5]", "[-1]", "[1000]", f"[{HUGE}]", json.dumps([1] * 129)],
    "stream": FLAGS,
    "ignore_eos": FLAGS,
    "skip_special_tokens": FLAGS,
    "include_stop_str_in_output": FLAGS,
    "stream_options": ["1", "[]", '{"include_usage": 1}', '{"include_usage": true}'],
    "cache_salt": [*STRINGS, json.dumps("x" * 1025)],
    "user": STRINGS,
    "response_format": ['{"type": "json_schema"}', '{"type": "json_schema", "json_schema": {}}', '{"type": 1}', "{}",
                        '{"type": "xml"}', '{"type": "structural_tag"}', '{"type": "json_schema", "json_schema": 1}',
                        '{"type": "grammar", "grammar": "x"}', "1", '"json"', "[]", '{"type": null}',
                        json.dumps({"type": "json_schema", "json_schema": {"schema": "x" * 70_000}}),
                        json.dumps({"type": "json_object", "schema": "x" * 70_000})],
    "guided_regex": ["1", "[]", "{}", json.dumps("x" * 70_000)],
    "guided_choice": ["1", '"a"', "[1]", "{}", "[null]"],
    "guided_grammar": ["1", "[]", json.dumps("x" * 70_000)],
    "guided_json": ["[1,", json.dumps("x" * 70_000)],
    "guided_anything": ["1"],
    "guided_decoding_backend": ['"outlines"'],
    "structured_outputs": ['{"regex": 1}', '{"unknown": 1}', '{"whitespace_pattern": "a"}',
                           '{"choice": "a"}', '{"regex": "a", "grammar": "b"}', "1"],
    "regex": ["1", "[]"],
    "ebnf": ["1", "{}"],
    "json_schema": ["1", "{}"],
    "functions": ["[{}]"],
    "function_call": ['{"name": "f"}'],
    "bad_words": ["1", '"a"', "[1]", '[" "]', json.dumps(["a"] * 129), '["\\udfff"]'],
    "allowed_token_ids": ["1", '["1"]', "[-1]", "[1000]", "[1.5]"],
    "truncate_prompt_tokens": [*INTEGERS, "0", "-2", "1025"],
    "structural_tag": ["1", '"{"', '"{}"', "{}"],
    "use_beam_search": ["true"],
    "stop_regex": ['"a"'],
    "processed_logprobs": ["1", "\"true\""],
    "logprob_token_ids": ["[1]", "1", '["1"]', "[-1]", "[1000]"],
    "prompt_logprobs": ["1"],
    "chat_template": ['"{{ 1 }}"'],
    "zzz": ["NaN", DEEP, "[1,", '"\\ud800"', "01"],
}  # fmt: skip
COMPLETION_FIELDS: dict[str, list[str]] = {
    "prompt": ["null", "1", "{}", "[]", "[[]]", "[1, [2]]", '["a", 1]', "[true]", "[1.5]", "[-1]", "[1000]", "[null]",
               f"[{HUGE}]", json.dumps(["a"] * 257), '"\\ud800"', json.dumps("x" * 9000), "[[[1]]]"],
    "logprobs": [*INTEGERS, "-1", "21"],
    "echo": FLAGS,
    "suffix": ['"end"', "1"],
    "best_of": [*INTEGERS, "0", "-1", "257"],
}  # fmt: skip
CHAT_FIELDS: dict[str, list[str]] = {
    "messages": [
        "null", "1", '"hi"', "{}", "[]", "[1]", "[{}]", '[{"role": "user"}]', '[{"content": "x"}]',
        '[{"role": "alien", "content": "x"}]', '[{"role": 1, "content": "x"}]', '[{"role": "user", "content": 1}]',
        '[{"role": "user", "content": null}]', '[{"role": "user", "content": []}]',
        '[{"role": "user", "content": [{"type": "text"}]}]', '[{"role": "user", "content": [{"text": "x"}]}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}]',
        '[{"role": "user", "content": "\\udc00"}]', '[{"role": "assistant", "tool_calls": [{}]}]',
        '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}]',
        '[{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]',
        '[{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]',
        '[{"role": "assistant", "function_call": {"name": "f"}}]', '[{"role": "user", "content": "x", "name": 1}]',
        '[{"role": "tool", "content": "x", "tool_call_id": 1}]', '[{"role": "tool", "content": "x"}]',
        '[{"role": "tool", "content": "x", "tool_call_id": ""}]',
        json.dumps([{"role": "user", "content": "x" * 9000}]), json.dumps([{"role": "r" * 9000, "content": "x"}]),
    ],
    "max_completion_tokens": [*INTEGERS, "0", "-1"],
    "tools": ['[{"type": "function"}]', '[{"type": "function", "function": {}}]', '[{"type": "web_search"}]', "[1]",
              "{}", "1",
              '[{"type": "function", "function": {"name": "a b"}}]', '[{"type": "function", "function": {"name": 1}}]',
              '[{"type": "function", "function": {"name": "f", "parameters": []}}]',
              '[{"type": "function", "function": {"name": "f", "parameters": "{}"}}]',
              json.dumps([{"type": "function", "function": {"name": "f"}}] * 2),
              json.dumps([{"type": "function", "function": {"name": f"f{index}"}} for index in range(1025)])],
    "tool_choice": ['"required"', '"any"', "1", "[]", "{}", '{"type": "function"}',
                    '{"type": "x", "function": {"name": "f"}}',
                    '{"type": "function", "function": {"name": 1}}', '{"type": "function", "function": {"name": "f"}}'],
    "parallel_tool_calls": FLAGS,
    "chat_template_kwargs": ["1", "[]", '{"enable_thinking": [1]}', '{"messages": "x"}', '{"__class__": 1}'],
    "add_generation_prompt": FLAGS,
    "continue_final_message": FLAGS,
    "separate_reasoning": FLAGS,
    "reasoning_effort": ["1", "[]"],
    "logprobs": ["1", "0", '"true"'],
    "top_logprobs": [*INTEGERS, "-1", "21", "5"],
}  # fmt: skip


RESPONSES_FIELDS: dict[str, list[str]] = {
    "input": ["null", "1", "{}", "[]", "[1]", "[{}]", '[{"role": "user"}]', '[{"role": "alien", "content": "x"}]',
              '[{"role": "user", "content": 1}]', '[{"type": "image"}]', '[{"type": "function_call"}]', '"\\ud800"',
              '[{"type": "function_call", "name": "f", "arguments": ["x"]}]', '[{"type": 1}]',
              '[{"type": "function_call_output", "call_id": "c"}]', '[{"type": "function_call_output", "output": "x"}]',
              '[{"role": "user", "content": [{"type": "input_image"}]}]', json.dumps("x" * 9000)],
    "instructions": STRINGS,
    "max_output_tokens": [*INTEGERS, "0", "-1"],
    "top_logprobs": [*INTEGERS, "-1", "21"],
    "text": ["1", "[]", '{"format": 1}', '{"format": {"type": "xml"}}', '{"format": {"type": "json_schema"}}'],
    "reasoning": ["1", '{"effort": 1}'],
    "tools": ['[{"type": "function"}]', '[{"type": "robot"}]', "1", '[{"type": "function", "name": "a b"}]',
              '[{"type": "custom"}]', '[{"type": "namespace", "tools": []}]', '[{"type": "shell"}, {"type": "shell"}]',
              '[{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}]'],
    "tool_choice": ['"required"', '"any"', '{"type": "function", "name": "f"}', "1", '{"type": "web_search"}',
                    '{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}'],
    "include": ["1", '"x"', "[1]"],
    "metadata": ["1", "[]", '{"a": 1}'],
    "truncation": ['"auto"', "1"],
    "background": ["true", *FLAGS],
    "store": FLAGS,
    "previous_response_id": ['"resp_1"', "1"],
    "conversation": ['"c"', "{}"],
}  # fmt: skip
EMBEDDING_FIELDS: dict[str, list[str]] = {
    "model": ['"other"', "1"],
    "input": ["null", "1", "{}", "[]", "[[]]", '["a", 1]', "[true]", "[-1]", "[1000]", json.dumps(["a"] * 2049)],
    "encoding_format": ["1", '"int8"'],
    "dimensions": [*INTEGERS, "0", "-1", str(1 << 21)],
    "pooling": ["1", '"max"', '"cls"'],
    "priority": [*INTEGERS, str(1 << 31)],
    "cache_salt": [*STRINGS, json.dumps("x" * 1025)],
    "truncate_prompt_tokens": [*INTEGERS, "0", "-2", "1025"],
    "prompt_name": [*STRINGS, '"query"'],
    "use_activation": ["1", '"no"'],
    "truncation_side": ['"left"'],
}  # fmt: skip
TOKENIZE_FIELDS: dict[str, list[str]] = {
    "prompt": ["null", "1", "[]", "{}", '"\\ud800"', json.dumps("x" * 9000)],
    "messages": ["1", "{}", "[1]"],
    "add_special_tokens": FLAGS,
    "return_token_strs": FLAGS,
    "model": ['"other"', "1"],
    "chat_template": ['"{{ 1 }}"'],
}  # fmt: skip
DETOKENIZE_FIELDS: dict[str, list[str]] = {
    "tokens": ["null", "1", '"x"', "[-1]", "[1000]", '["a"]', "[1.5]", f"[{HUGE}]", "[[1]]"],
    "model": ['"other"', "1"],
}  # fmt: skip


def cases() -> Iterator[tuple[str, str, bytes]]:
    """(path, field, body)."""
    completion = {"model": json.dumps(MODEL), "prompt": '"p"'}
    chat = {"model": json.dumps(MODEL), "messages": '[{"role": "user", "content": "p"}]'}
    for path, sound, fields in (
        ("/v1/completions", completion, {**ANY_FIELDS, **COMPLETION_FIELDS}),
        ("/v1/chat/completions", chat, {**ANY_FIELDS, **CHAT_FIELDS}),
        ("/v1/responses", {"model": json.dumps(MODEL), "input": '"p"'}, {**ANY_FIELDS, **RESPONSES_FIELDS}),
        ("/v1/embeddings", {"model": json.dumps(MODEL), "input": '"p"'}, EMBEDDING_FIELDS),
        ("/tokenize", {"prompt": '"p"'}, TOKENIZE_FIELDS),
        ("/detokenize", {"tokens": "[1]"}, DETOKENIZE_FIELDS),
    ):
        for field, values in fields.items():
            for value in values:
                members = {**sound, field: value}
                yield path, field, ("{" + ", ".join(f'"{k}": {v}' for k, v in members.items()) + "}").encode()


BROKEN_BODIES = {
    "empty": b"",
    "truncated": b'{"model": "fake',
    "array": b"[]",
    "number": b"1",
    "null": b"null",
    "bad utf-8": b'{"model": "\xff", "prompt": "p"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"model": "m"}'.encode("utf-16"),
    "trailing": b"{} {}",
    "deep": DEEP.encode(),
    "deep objects": b'{"a":' * 100_000,
    "deep, in what is kept as it came": b'{"model": "m", "prompt": "p", "messages": [], "guided_json": '
    + b'{"a":[' * 100
    + b"]}" * 100
    + b"}",
    "bad utf-8, in what is kept as it came": b'{"model": "fake/model-1", "prompt": "p", "guided_json": {"a": "\xff"}}',
    "zeros": b"\0" * 1000,
    "long key": b'{"' + b"k" * 200_000 + b'": NaN}',
}
WRONG_HEADERS: dict[str, tuple[dict[str, str], bytes, int]] = {
    "gzip": ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 1_000_000), 415),
    "deflate": ({"Content-Encoding": "deflate"}, b"x", 415),
    "two encodings": ({"Content-Encoding": "identity, gzip"}, b"x", 415),
    "text": ({"Content-Type": "text/plain"}, b"{}", 415),
    "form": ({"Content-Type": "application/x-www-form-urlencoded"}, b"{}", 415),
    "no type": ({"Content-Type": ""}, b"{}", 415),
    "odd charset": ({"Content-Type": "application/json; charset=bogus"}, b"{", 400),
    "odd expectation": ({"Expect": "a-miracle"}, b"{}", 417),
    "declared too large": ({"Content-Length": str(1 << 40)}, b"", 413),
    "declared beyond belief": ({"Content-Length": HUGE}, b"", 400),
    "negative length": ({"Content-Length": "-1"}, b"", 400),
}
NOT_HTTP = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no target": b"GET\r\n\r\n",
    "odd version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "odd method": b"G\x00T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    "header without colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "null in header": b"GET /health HTTP/1.1\r\nHost: x\x00y\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    "broken target": b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
}


class Canary:
    """A well-behaved client that asks again and again and remembers the longest it had to wait.

    busiest_s: the most that this process computed while it waited: less than ``slowest_s`` where others had the
    processor, and as much where the server was busy with something else."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sing, name="canary")
        self.replies: list[int] = []
        self.slowest_s = 0.0
        self.busiest_s = 0.0

    def __enter__(self) -> "Canary":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(far(10))

    def _sing(self) -> None:
        body = {"model": MODEL, "prompt": "canary", "max_tokens": 3}
        while not self._stopping.wait(0.005):
            started, computed = time.monotonic(), time.process_time()
            self.replies.append(ask(self._port, "POST", "/v1/completions", body).status)
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            self.busiest_s = max(self.busiest_s, time.process_time() - computed)


def test_a_target_that_aiohttp_parses_and_cannot_use_is_refused_and_closed(live: LiveServer) -> None:
    with RawClient(live.port) as client:
        client.send(b"CONNECT \nx:80 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.read_reply().error["code"] == "malformed_http"
        assert client.seconds_until_closed() < 1


def check_refusal(reply: Reply, what: object) -> None:
    assert 400 <= reply.status < 500, (what, reply)
    assert set(reply.error) == {"message", "type", "param", "code"}, what
    assert reply.error["type"] in ("invalid_request_error", "not_found_error"), what
    assert reply.headers["x-request-id"], what
    assert len(reply.body) < 1000, what  # no long echo of what was sent
    assert b"Traceback" not in reply.body, what
    assert b".py" not in reply.body, what


@pytest.mark.reliability("H1", "more than 900 bodies with a field that is wrong, and a healthy client beside them")
def test_every_wrong_field_is_refused_by_name_while_others_are_served(live: LiveServer, figure: Figure) -> None:
    num_cases, slowest_s = 0, 0.0
    with Canary(live.port) as canary:
        for path, field, body in cases():
            started = time.monotonic()
            reply = ask(live.port, "POST", path, body)
            slowest_s = max(slowest_s, time.monotonic() - started)
            check_refusal(reply, (path, field, body[:200]))
            if reply.error["code"] != "malformed_json":
                # Some fields only make sense beside another one, which may take the blame.
                param = (reply.error["param"] or "").partition("[")[0].partition(".")[0]
                assert param in (field, "min_tokens", "stream_options"), (field, body[:200], reply)
            num_cases += 1
    figure("refused, in the API's words", num_cases, at_least=900)
    figure("slowest refusal", slowest_s, "s", at_most=5)
    assert len(canary.replies) > 2
    assert set(canary.replies) == {200}
    figure("healthy client's longest wait", canary.slowest_s, "s", at_most=0.5, patience=10)
    figure("computed while it waited", canary.busiest_s, "s", at_most=0.5)
    assert live.call(lambda: live.ingress.num_open) == 0


@pytest.mark.reliability("H1", "bodies, headers and bytes that are not JSON or not HTTP")
@pytest.mark.parametrize("name", BROKEN_BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_broken_bodies_are_refused(live: LiveServer, path: str, name: str) -> None:
    check_refusal(ask(live.port, "POST", path, BROKEN_BODIES[name]), name)


@pytest.mark.reliability("H1", "bodies, headers and bytes that are not JSON or not HTTP")
@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_wrong_headers_are_refused(live: LiveServer, name: str) -> None:
    headers, body, status = WRONG_HEADERS[name]
    reply = ask(live.port, "POST", "/v1/completions", body, headers)
    check_refusal(reply, name)
    assert reply.status == status


@pytest.mark.reliability("H1", "bodies, headers and bytes that are not JSON or not HTTP")
@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_not_http_is_refused_and_closed(live: LiveServer, name: str) -> None:
    with RawClient(live.port) as client:
        client.send(NOT_HTTP[name])
        reply = client.read_reply()
        check_refusal(reply, name)
        assert reply.status == (431 if name.startswith("long ") else 400)
        assert client.seconds_until_closed() < 5
    assert ask(live.port, "GET", "/health").status == 200


@pytest.mark.parametrize(
    "method, path, status, code",
    [
        ("GET", "/page/../app.py", 404, "unknown_route"),
        ("GET", "/page/..%2fapp.py", 404, "unknown_route"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1", 404, "unknown_route"),
        ("POST", "/v1/audio/speech", 404, "unknown_route"),
        ("GET", "/%2e%2e/%00", 404, "unknown_route"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/" + "x" * 3000, 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, "model_not_found"),
    ],
)
def test_unknown_routes_and_methods(live: LiveServer, method: str, path: str, status: int, code: str) -> None:
    reply = ask(live.port, method, path)
    check_refusal(reply, path)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert ("allow" in reply.headers) == (status == 405)


def test_a_body_is_counted_when_it_does_not_declare_its_size(live: LiveServer) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with RawClient(live.port) as client:
        headers = b"Host: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(b"POST /v1/completions HTTP/1.1\r\n" + headers + chunk * 64 + b"1\r\n{\r\n")
        reply = client.read_reply()
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_the_largest_body_allowed_is_served(live: LiveServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "p"}).encode()
    body += b" " * ((4 << 20) - len(body))
    assert ask(live.port, "POST", "/v1/completions", body).status == 200
    assert ask(live.port, "POST", "/v1/completions", body + b" ").status == 413


@pytest.mark.parametrize(
    "wrong",
    [{"created": 1e300}, {"created": -1.0}, {"told": {"0": {"tokens": "", "num_events": -1}}}, {"key": "x"}],
    ids=["far", "before 1970", "fewer than no events", "no key"],
)
def test_an_origin_that_no_router_sends_is_refused(live: LiveServer, wrong: dict[str, object]) -> None:
    origin = {"key": str(uuid.UUID(int=1)), "created": 1.0, "seed": 1, "told": {}}
    headers = {"Content-Type": ROUTED_TYPE}
    body = {"request": {"model": MODEL, "prompt": "p", "stream": True}}
    assert ask(live.port, "POST", "/v1/completions", body | {"origin": origin}, headers).status == 200
    reply = ask(live.port, "POST", "/v1/completions", body | {"origin": origin | wrong}, headers)
    assert (reply.status, reply.error["code"]) == (400, "malformed_json")


def test_what_client_libraries_add_is_let_through(live: LiveServer) -> None:
    body = {
        "model": MODEL,
        "prompt": "p",
        "metadata": {"a": 1},
        "store": None,
        "user": "u",
        "best_of": 1,
        "suffix": "",
        "zzz": 1,
    }
    assert ask(live.port, "POST", "/v1/completions", body).status == 200
    headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "identity"}
    assert ask(live.port, "POST", "/v1/completions", body, headers).status == 200
    assert ask(live.port, "POST", "/v1/completions", body, {"Expect": "100-continue"}).status == 200
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": [], "tool_choice": "none"}
    chat["response_format"] = {"type": "text"}
    assert ask(live.port, "POST", "/v1/chat/completions", chat).status == 200


def test_pipelined_requests_are_answered_in_order(live: LiveServer) -> None:
    bodies = [json.dumps({"model": MODEL, "prompt": str(number), "max_tokens": 6}).encode() for number in range(100)]
    alone = [ask(live.port, "POST", "/v1/completions", body).json["choices"] for body in bodies]
    with RawClient(live.port) as client:
        client.send(b"".join(http_bytes("POST", "/v1/completions", body) for body in bodies))
        assert [client.read_reply().json["choices"] for _ in bodies] == alone
