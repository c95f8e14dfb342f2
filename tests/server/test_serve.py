"""The process: signals, draining, exit codes, the port."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.types.errors import ConfigError
from server.http.listener import ListenError, bind, url_of
from tests.pace import at_some_pace, far
from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer

ROOT = Path(__file__).parents[2]
STREAM = {"model": MODEL, "prompt": "p", "max_tokens": 10, "stream": True}


class Process:
    """``serve_fake.py`` running."""

    def __init__(self, **options: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.wait_for(lambda: ask(self.port, "GET", "/health").status == 200)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit(self, timeout_s: float = 5) -> tuple[int, str]:
        """(exit code, stderr) once it ends by itself."""
        _, stderr = self._process.communicate(timeout=far(timeout_s))
        return self._process.returncode, stderr

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @staticmethod
    def wait_for(condition: object, timeout_s: float = 10) -> None:
        deadline = time.monotonic() + far(timeout_s)
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def process(**options: object) -> Iterator[Process]:
    process = Process(**options)
    try:
        yield process
    finally:
        process.kill()


def start_stream(port: int, **fields: object) -> RawClient:
    """A client that has its first event and leaves the rest to be read."""
    client = RawClient(port)
    client.send(http_bytes("POST", "/v1/completions", json.dumps({**STREAM, **fields}).encode()))
    head = client.read_until(b"\r\n\r\n")
    size = client.read_until(b"\r\n")
    client._buffer = head + size + client._buffer
    return client


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_at_once(number: signal.Signals) -> None:
    with process() as server:
        server.signal(number)
        assert server.exit(2) == (0, "")


@pytest.mark.slow
@at_some_pace
def test_draining_refuses_new_requests_and_finishes_open_ones(pace: float) -> None:
    with process(delay_s=0.2 * pace) as server, start_stream(server.port) as client:
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: ask(server.port, "GET", "/ready").status == 503, 1)
        assert ask(server.port, "GET", "/health").json["status"] == "draining"
        refused = ask(server.port, "POST", "/v1/completions", STREAM)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        *chunks, done = client.read_reply().events
        assert (len(chunks), done) == (10, "[DONE]")
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit() == (0, "")


@pytest.mark.slow
def test_what_is_open_when_draining_ends_is_told_so() -> None:
    with process(delay_s=0.2, server={"drain_timeout_s": 0.3}) as server, start_stream(server.port) as client:
        server.signal(signal.SIGTERM)
        *_, error, done = client.read_reply().events
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        assert server.exit() == (0, "draining: 1 requests end unfinished\n")


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_exits_at_once(first: signal.Signals) -> None:
    with process(delay_s=1.0) as server, start_stream(server.port):
        server.signal(first)
        server.wait_for(lambda: ask(server.port, "GET", "/ready").status == 503, 1)
        server.signal(signal.SIGINT)
        assert server.exit(1) == (130, "")


@pytest.mark.slow
def test_a_second_sigterm_says_nothing_new() -> None:
    with process(delay_s=0.2) as server, start_stream(server.port) as client:
        for _ in range(3):
            server.signal(signal.SIGTERM)
        *chunks, done = client.read_reply().events
        assert (len(chunks), done) == (10, "[DONE]")
        assert server.exit() == (0, "")


@pytest.mark.slow
def test_a_signal_while_the_model_loads() -> None:
    with process(ready=False) as server:
        assert ask(server.port, "GET", "/health").json["status"] == "loading"
        server.signal(signal.SIGTERM)
        assert server.exit(2) == (0, "")


@pytest.mark.slow
@at_some_pace
def test_the_end_of_the_engine_ends_the_server_after_clients_were_told(pace: float) -> None:
    with process(delay_s=0.2 * pace, die_after_s=0.8 * pace) as server, start_stream(server.port) as client:
        *_, error, done = client.read_reply().events
        assert (error["error"]["code"], done) == ("engine_died", "[DONE]")
        code, stderr = server.exit()
        assert code == 1
        assert stderr == "error: executor crashed: ZeroDivisionError: division by zero\n"


@pytest.mark.reliability("P8", "a port that is in use")
def test_a_port_in_use_is_one_line_and_an_exit_code_of_its_own() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} is in use; stop the process.*or set another") as caught:
            bind("127.0.0.1", port)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, ConfigError)
        assert caught.value.exit_code == 98


def test_a_port_is_shared_by_processes_that_all_want_that() -> None:
    with bind("127.0.0.1", 0, is_shared=True) as one:
        port = one.getsockname()[1]
        bind("127.0.0.1", port, is_shared=True).close()
        with pytest.raises(ListenError, match="is in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host, shown", [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_the_address_that_is_told_can_be_opened(host: str, shown: str) -> None:
    if not socket.has_ipv6 and ":" in host:
        pytest.skip("this machine has no IPv6")
    try:
        listener = bind(host, 0)
    except ListenError:
        pytest.skip("this machine has no IPv6 address of its own")
    with listener:
        assert url_of(listener) == f"{shown}{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "host, says", [("192.0.2.1", "not an address of this machine"), ("no.such.host.invalid", "not a known address")]
)
def test_an_address_that_is_not_here_says_so(host: str, says: str) -> None:
    with pytest.raises(ListenError, match=says):
        bind(host, 8000)


def test_a_port_can_be_taken_again_right_after_it_was_used() -> None:
    with LiveServer() as live:
        ask(live.port, "GET", "/health")
        port = live.port
    bind("127.0.0.1", port).close()


def test_clients_that_connect_before_the_server_runs_wait_for_it() -> None:
    with bind("127.0.0.1", 0) as listener, RawClient(listener.getsockname()[1]) as client:
        client.send(http_bytes("GET", "/health"))
        accepted, _ = listener.accept()
        assert accepted.recv(1) == b"G"
        accepted.close()


def test_send_buffers_stay_small() -> None:
    with LiveServer() as live, RawClient(live.port) as client:
        client.send(http_bytes("GET", "/health"))
        client.read_reply()
        (connection,) = live.runner.server.connections
        accepted = connection.transport.get_extra_info("socket")
        # Linux doubles what it is asked for, to have room for its bookkeeping.
        assert live.call(lambda: accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)) <= 2 * (64 << 10)


def test_the_python_http_parser_is_refused() -> None:
    code = "from server.http.connection import require_c_parser; require_c_parser()"
    environment = {**os.environ, "AIOHTTP_NO_EXTENSIONS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ConfigError: aiohttp runs without its C parser" in ended.stderr
