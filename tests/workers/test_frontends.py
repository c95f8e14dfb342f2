"""The whole server with HTTP and ingress in a process of their own: what it serves, and how it is lost and drained."""

import asyncio
import http.server
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.pace import far
from tests.server.http_client import as_operator
from tests.workers.executors import alive, children, held, within
from tests.workers.server import MODEL, QUICK, Client, Server, stream_all

pytestmark = pytest.mark.slow

INLINE = ("placement.executor=inline", "kv.num_pages=1024")
FRONT = (*INLINE, "placement.ingress=process")
TOKENS = 120
PROMPT = "def a_prompt_that_is_longer_than_a_page(first, second, third):\n    return first + second + third\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]},
    },
}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def front_of(server: Server) -> int:
    """The pid of the frontend, once there is one."""
    within(10, lambda: len(children(server.process.pid, "frontend_process")) == 1)
    return children(server.process.pid, "frontend_process")[0]


def fetch(server: Server, path: str, body: dict | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST with one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"} | as_operator())
    try:
        with urllib.request.urlopen(request, timeout=far(15)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(server: Server, path: str, body: dict | None = None) -> Any:
    """What a request is answered with, which must be 200."""
    status, answer = fetch(server, path, body)
    assert status == 200, answer
    return json.loads(answer)


def cached_tokens(server: Server, prompt: str = PROMPT) -> int:
    """How much of a prompt is found in the prefix cache."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    found: int = ask(server, "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def strike(server: Server, number: signal.Signals) -> tuple[Client, list[BaseException | None]]:
    """A signal to the frontend under 16 streams; returns these, and how their connections broke."""
    client = Client(server.url, 16, 1000)

    running = asyncio.ensure_future(client.run(may_break=True))
    async with asyncio.timeout(far(30)):
        while not client.begun:
            await asyncio.sleep(0.002)
    os.kill(front_of(server), number)
    return client, await asyncio.wait_for(running, far(30))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*FRONT, "placement.silence_timeout_s=1.5", "placement.max_restarts=20") as server:
        yield server
        code, logged = server.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in logged


@pytest.fixture(scope="module")
def inline() -> Iterator[Server]:
    """One that has all in one process, to compare with."""
    with Server(*INLINE) as server:
        yield server


@pytest.fixture(scope="module")
def expected(inline: Server) -> list[str]:
    """The texts of 16 undisturbed streams."""
    client = stream_all(inline, 16, max_tokens=TOKENS)
    assert client.done == 16
    return client.texts


def answers(server: Server) -> list[Any]:
    """What the official client gets for one request of each kind."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chat: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        tools = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
        whole = client.chat.completions.create(**chat)
        events = list(client.chat.completions.create(**chat, stream=True))
        structured = client.chat.completions.create(**chat, response_format=schema)  # type: ignore[call-overload]
        called = client.chat.completions.create(**{**chat, **tools}).choices[0]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**chat, "temperature": -1})
        return [
            whole.choices[0].message.content,
            whole.usage,
            "".join(event.choices[0].delta.content or "" for event in events if event.choices),
            json.loads(structured.choices[0].message.content or ""),
            [(call.function.name, call.function.arguments) for call in called.message.tool_calls or []],
            refused.value.body,
        ]


def test_clients_cannot_tell_the_difference(server: Server, inline: Server, expected: list[str]) -> None:
    ours, theirs = answers(server), answers(inline)
    assert ours == theirs
    assert ours[2] == ours[0]
    assert ours[3]["n"] in (1, 2)
    assert ours[4][0][0] == "weather"
    client = stream_all(server, 16, max_tokens=TOKENS)
    assert (client.texts, client.done) == (expected, 16)
    tokenized = {"model": MODEL, "prompt": PROMPT}
    assert ask(server, "/tokenize", tokenized) == ask(inline, "/tokenize", tokenized)


def test_operators_cannot_either(server: Server, inline: Server) -> None:
    for path in ("/", "/page/page.js", "/openapi.json", "/version"):
        assert fetch(server, path) == fetch(inline, path)
    for path in ("/health", "/ready", "/server_info", "/load", "/v1/models", "/health_generate"):
        assert ask(server, path).keys() == ask(inline, path).keys(), path
    for one in (server, inline):
        cached_tokens(one)
        within(5, lambda: ask(one, "/stats")["requests"]["running"] == 0)  # noqa: B023
    ours, theirs = ask(server, "/stats"), ask(inline, "/stats")
    assert ours.keys() == theirs.keys()
    for key in ("status", "model", "version", "requests", "restarts", "front_restarts", "stalled_s"):
        assert ours[key] == theirs[key], key
    for key in ("ended", "tokens", "tokens_per_s", "pages", "latency"):
        assert ours[key].keys() == theirs[key].keys(), key
    assert ours["steps"][0].keys() == theirs["steps"][0].keys()
    assert any(node["text"] and node["text"].startswith("def a_prompt") for node in ours["prefixes"])
    here, there = (set(re.findall(r"# TYPE (\S+)", fetch(one, "/metrics")[1].decode())) for one in (server, inline))
    only_here = {name for name in here if name.startswith("callboard_engine_process_")}
    assert here - only_here == there
    assert "callboard_engine_process_resident_memory_bytes" in only_here


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_front_ends_its_connections_and_another_one_serves_on_the_same_port(
    server: Server, expected: list[str], number: signal.Signals
) -> None:
    before = ask(server, "/stats")["front_restarts"]
    victim = front_of(server)
    client, broken = await strike(server, number)
    assert not client.done
    assert all(isinstance(one, Exception) for one in broken), "every connection has ended"
    within(10, lambda: fetch(server, "/ready")[0] == 200)  # who connects meanwhile waits for the next frontend
    assert not alive(victim)
    within(5, lambda: ask(server, "/stats")["requests"]["running"] == 0)
    stats = ask(server, "/stats")
    assert (stats["requests"]["open"], stats["pages"]["used"]) == (0, 0)
    assert stats["pages"]["free"] + stats["pages"]["cached"] == 1024
    assert (stats["front_restarts"], stats["ended"]["abort"] >= 16) == (before + 1, True)
    again = await asyncio.to_thread(stream_all, server, 16, max_tokens=TOKENS)
    assert (again.texts, again.errors) == (expected, [None] * 16)


def test_an_engine_that_does_not_answer_is_told_and_not_waited_for(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for path in ("/ready", "/stats", "/metrics", "/load"):
            began = time.monotonic()
            status, body = fetch(server, path)
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_silent"), path
            assert time.monotonic() - began < far(8)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    within(10, server.ready)


def test_a_cache_that_was_reset_stays_so_when_the_front_is_lost(server: Server) -> None:
    cached_tokens(server)
    assert cached_tokens(server) > 0
    assert ask(server, "/reset_prefix_cache", {}) == {"success": True}
    assert cached_tokens(server) == 0
    assert cached_tokens(server) > 0
    victim = front_of(server)
    os.kill(victim, signal.SIGKILL)
    within(10, lambda: not alive(victim))
    assert cached_tokens(server) > 0, "what was cached since then is found"
    assert ask(server, "/reset_prefix_cache", {}) == {"success": True}
    assert cached_tokens(server) == 0


async def test_requests_are_aborted_by_name(server: Server) -> None:
    client = Client(server.url, 4, 1000)
    running = asyncio.ensure_future(client.run())
    async with asyncio.timeout(far(30)):
        while not client.begun:
            await asyncio.sleep(0.002)
    ended = await asyncio.to_thread(ask, server, "/abort_request", {"abort_all": True})
    assert ended["num_aborted"] == 4
    await asyncio.wait_for(running, far(10))
    assert client.reasons == ["abort"] * 4
    within(5, lambda: ask(server, "/stats")["pages"]["used"] == 0)


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Where OpenTelemetry's spans go: its address, and what has come."""
    came: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/v1/traces", came
        listening.shutdown()
        thread.join()


def test_sigterm_lets_streams_end_and_takes_no_more_and_traces_know_of_the_engine() -> None:
    options = ("placement.executor=process", f"server.drain_timeout_s={far(30):g}")
    with (
        collector() as (address, came),
        Server(*FRONT, f"server.traces={address}", *options, launcher=QUICK) as server,
    ):

        def terminate() -> None:
            with held(server.process.pid):  # it would be gone once the streams have ended
                server.process.send_signal(signal.SIGTERM)
                within(5, lambda: server.get("/ready")[0] == 503, every_s=0.001)
                refused = stream_all(server, 1)
                assert refused.errors[0] is not None
                assert refused.errors[0]["error"]["code"] == "draining"
                assert server.get("/health")[1]["status"] == "draining"

        client = stream_all(server, 16, terminate, max_tokens=500)
        assert (client.done, set(client.reasons)) == (16, {"length"})
        code, logged = server.end()
        assert (code, "Traceback" in logged) == (0, False), logged
    spans = b"".join(came)
    assert [spans.count(name) >= 16 for name in (b"queue", b"prefill", b"callboard.output_tokens")] == [True] * 3


def test_what_is_open_when_draining_ends_is_told_so() -> None:
    with Server(*FRONT, "server.drain_timeout_s=0.3", launcher=QUICK) as server:
        client = stream_all(server, 16, lambda: server.process.send_signal(signal.SIGTERM), max_tokens=2000)
        codes = {error["error"]["code"] for error in client.errors if error is not None}
        assert codes == {"shutting_down"}
        code, logged = server.end()
        assert (code, "Traceback" in logged) == (0, False), logged
        assert re.search(r"draining: \d+ requests end unfinished", logged)


def test_a_second_sigint_ends_everything_at_once() -> None:
    with Server(*FRONT, launcher=QUICK) as server:

        def interrupt() -> None:
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does it
            within(5, lambda: server.get("/ready")[0] == 503)
            os.killpg(server.process.pid, signal.SIGINT)

        with pytest.raises(Exception, match=r"payload|closed|reset|disconnected"):
            stream_all(server, 4, interrupt, max_tokens=1500)
        code, logged = server.end(timeout_s=10)
        assert (code, "Traceback" in logged) == (130, False), logged
        within(5, lambda: not server.group())


def test_a_front_that_cannot_live_ends_the_server_with_one_line() -> None:
    with Server(*FRONT, "placement.max_restarts=2", launcher=QUICK) as server:
        while server.process.poll() is None:
            for pid in children(server.process.pid, "frontend_process"):
                os.kill(pid, signal.SIGKILL)
                within(5, lambda: not alive(pid))  # noqa: B023
            time.sleep(0.02)
        code, logged = server.end(timeout_s=40)
        assert code == 1
        assert (
            logged.strip().splitlines()[-1]
            == "callboard: frontend was killed by SIGKILL; 2 restarts in 300 s did not help"
        )
        assert "Traceback" not in logged


def test_clients_are_told_when_the_engine_dies() -> None:
    with Server(*FRONT, "placement.executor=process", "placement.max_restarts=0", launcher=QUICK) as server:
        client = stream_all(
            server, 4, lambda: os.kill(children(server.process.pid)[0], signal.SIGKILL), max_tokens=2000
        )
        assert [error and error["error"]["code"] for error in client.errors] == ["engine_died"] * 4
        code, logged = server.end()
        assert (code, "Traceback" in logged) == (1, False), logged
        assert logged.strip().splitlines()[-1].startswith("callboard: executor0 was killed by SIGKILL")


@pytest.mark.parametrize("when", ["serving", "loading"])
def test_a_killed_engine_takes_its_front_with_it_and_frees_the_port(when: str) -> None:
    ways = {"wait": True, "launcher": QUICK} if when == "serving" else {"wait": False}
    with Server(*FRONT, **ways) as server:
        frontend = front_of(server)
        if when == "loading":
            within(20, lambda: not os.listdir(server.sockets))  # connected: it is loading now
        server.process.kill()
        server.process.wait()
        within(5, lambda: not alive(frontend))
        assert server.group() == []
    if when == "serving":
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_sigterm_while_it_loads() -> None:
    with Server(*FRONT, wait=False) as server:
        front_of(server)
        code, logged = server.end(signal.SIGTERM)
        assert (code, "Traceback" in logged) == (0, False), logged


def test_a_front_that_refuses_its_configuration_ends_the_server_as_it_would_inline() -> None:
    ended = []
    for placement in (INLINE, FRONT):
        with Server(*placement, wait=False, env={"AIOHTTP_NO_EXTENSIONS": "1"}, launcher=QUICK) as server:
            code, logged = server.end()
            ended.append((code, [line for line in logged.splitlines() if line.startswith("callboard: ")]))
    assert ended[0] == ended[1]
    assert ended[0][0] == 2
    (line,) = ended[0][1]
    assert line.startswith("callboard: aiohttp runs without its C parser")
