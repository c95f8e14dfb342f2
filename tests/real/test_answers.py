"""The real model answers: with its own chat template, in JSON, with speculation, and through a crash."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from callboard import LLM, Grammar, SamplingParams
from tests.ports import free_port

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=48, temperature=0.0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
READY_S = 240.0


def test_a_question_is_answered_with_the_files_own_template(engine: Callable[..., LLM]) -> None:
    (one,) = engine().chat([QUESTION], GREEDY)
    assert "Paris" in one.text
    assert one.finish_reason == "stop"


def test_json_follows_its_schema(engine: Callable[..., LLM]) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = GREEDY.replace(max_tokens=64, grammar=Grammar("json_schema", json.dumps(schema)))
    question = [{"role": "user", "content": "Ada Lovelace was 36 years old. Write her name and age as JSON."}]
    (one,) = engine().chat([question], params)
    found = json.loads(one.text)
    assert set(found) == {"name", "age"}
    assert "Ada" in found["name"]
    assert type(found["age"]) is int


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_speculation_on_real_text_is_accepted_and_changes_nothing(proposer: str, engine: Callable[..., LLM]) -> None:
    text = "The red fox ran. The blue fox slept. The green fox ate."
    question = [{"role": "user", "content": f"Repeat this text word for word, three times: {text}"}]
    (plain,) = engine().chat([question], GREEDY)
    (drafted,) = engine(plugins={"proposer": proposer}).chat([question], GREEDY)
    assert drafted.token_ids == plain.token_ids
    proposed = drafted.usage.accepted_tokens + drafted.usage.rejected_tokens
    assert proposed
    assert drafted.usage.accepted_tokens >= len(plain.token_ids) // 4


@contextmanager
def _served(path: Path, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    sets = (
        f"storage.folder={folder}", "storage.journal_streams=true", "kv.num_pages=256", "model.max_model_len=1024",
        "device.kind=cpu",
    )  # fmt: skip
    command = [sys.executable, "-m", "callboard", "serve", str(path), "--port", str(port)]
    options = [word for one in sets for word in ("--set", one)]
    with subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + READY_S
            while time.monotonic() < end and process.poll() is None:
                with suppress(OSError), _asked(port, "/ready") as answer:
                    if answer.status == 200:
                        break
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


@contextmanager
def _asked(port: int, path: str, body: bytes = b"", **headers: str) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)) as connection:
        headers |= {"Content-Type": "application/json"}
        connection.request("POST" if body else "GET", path, body or None, headers)
        with connection.getresponse() as answer:
            yield answer


def _events(answer: http.client.HTTPResponse, most: int | None = None) -> list[str]:
    found: list[str] = []
    while (line := answer.readline()) and (most is None or len(found) < most):
        if line.strip():
            found.append(line.decode().strip())
    return found


def test_a_forced_call_follows_the_functions_schema_though_the_template_has_no_tools(
    real: Path, tmp_path: Path
) -> None:
    names = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    function = {"name": "weather", "parameters": names | {"additionalProperties": False}, "strict": True}
    port, asked = free_port(), {"role": "user", "content": "What is the weather in Paris?"}
    body = {"model": real.stem, "messages": [asked], "tools": [{"type": "function", "function": function}]}
    with _served(real, tmp_path, port):
        forced = json.dumps(
            body | {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 64}
        ).encode()
        with _asked(port, "/v1/chat/completions", forced) as answer:
            (choice,) = json.load(answer)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_a_stream_is_rejoined_after_a_kill_as_if_nothing_had_happened(real: Path, tmp_path: Path) -> None:
    port = free_port()
    body = json.dumps(
        {"model": real.stem, "prompt": "Once upon a time", "max_tokens": 120, "seed": 3, "stream": True}
        | {"temperature": 0.8, "ignore_eos": True}
    ).encode()
    with _served(real, tmp_path, port) as first:
        with _asked(port, "/v1/completions", body, **{"X-Request-Id": "whole"}) as answer:
            whole = _events(answer)
        with _asked(port, "/v1/completions", body, **{"X-Request-Id": "cut"}) as answer:
            begun = _events(answer, most=20)
            os.kill(first.pid, signal.SIGKILL)
        first.wait()
    seen = [line.removeprefix("id: ") for line in begun if line.startswith("id: ")]
    assert 0 < len(seen) < 100
    with _served(real, tmp_path, port), _asked(port, "/v1/streams/cut", **{"Last-Event-ID": seen[-1]}) as answer:
        rest = _events(answer)
    begun = begun[: begun.index(f"id: {seen[-1]}") + 2]
    assert _text(begun) + _text(rest) == _text(whole)


def _text(lines: list[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for one in events for choice in json.loads(one)["choices"])
