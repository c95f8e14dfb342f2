"""Clients that are slow on purpose: each deadline cuts them, and none cuts anybody else."""

import json
import time
from contextlib import suppress

import pytest

from engine.settings.sections import ServerSection
from server.http import connection
from tests.pace import at_some_pace
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer

DEADLINE_S = 0.5
LATEST_S = DEADLINE_S + 1.5  # the cores are shared with other work
CLOSED_S = 30.0  # far sooner than an idle connection is closed
GET = http_bytes("GET", "/health")
COMPLETION = json.dumps({"model": MODEL, "prompt": "p"}).encode()
FLOOD = json.dumps(
    {"model": MODEL, "prompt": "!flood", "max_tokens": 8000, "ignore_eos": True, "stream": True}
).encode()


def serving(pace: float = 1.0) -> LiveServer:
    return LiveServer(server=ServerSection(client_timeout_s=DEADLINE_S * pace))


def drip(client: RawClient, data: bytes, every_s: float) -> float:
    """Send a byte now and then until the server has had enough; seconds until then."""
    started = time.monotonic()
    client.socket.settimeout(every_s)
    try:
        for byte in data:
            client.send(bytes([byte]))
            try:
                if not client.socket.recv(1 << 16):
                    break
            except TimeoutError:
                pass
    except ConnectionError:
        pass
    return time.monotonic() - started


@at_some_pace
def test_a_dripping_header_is_cut(pace: float) -> None:
    with serving(pace) as live, RawClient(live.port) as client:
        took_s = drip(client, b"GET /health HTTP/1.1\r\nX: " + b"x" * 1000, 0.05)
        assert (DEADLINE_S - 0.1) * pace <= took_s <= LATEST_S * pace


def test_a_header_that_stops_is_told_why_and_cut() -> None:
    with serving() as live, RawClient(live.port) as client:
        client.send(b"GET /health HT")
        reply = client.read_reply()
        assert (reply.status, reply.error["code"]) == (408, "header_timeout")
        assert client.seconds_until_closed() < CLOSED_S


@at_some_pace
def test_the_header_deadline_is_that_of_each_request_not_of_the_connection(pace: float) -> None:
    with serving(pace) as live, RawClient(live.port) as client:
        for _ in range(4):
            client.send(GET[:20])
            time.sleep(DEADLINE_S * pace / 2)
            client.send(GET[20:])
            assert client.read_reply().status == 200
            time.sleep(DEADLINE_S * pace / 2)
        time.sleep(DEADLINE_S * pace * 2)  # idle, which has a deadline of its own
        client.send(GET)
        assert client.read_reply().status == 200
        client.send(GET[:20])
        assert client.read_reply().status == 408


def test_a_header_behind_a_running_request_does_not_hurt_it() -> None:
    ingress = FakeIngress(delay_s=0.2)
    with LiveServer(ingress, server=ServerSection(client_timeout_s=DEADLINE_S)) as live, RawClient(live.port) as client:
        client.send(http_bytes("POST", "/v1/completions", COMPLETION))
        time.sleep(0.1)
        client.send(b"\r\n" + GET[:20])
        assert client.read_reply().status == 200  # after 2.4 s
        assert client.read_reply().status == 408


@at_some_pace
def test_a_body_that_stops_is_told_why_and_cut(pace: float) -> None:
    with serving(pace) as live, RawClient(live.port) as client:
        client.send(http_bytes("POST", "/v1/completions", b"", {"Content-Length": "1000"}))
        started = time.monotonic()
        client.send(b"{")
        reply = client.read_reply()
        assert (reply.status, reply.error["code"]) == (408, "body_timeout")
        assert time.monotonic() - started <= LATEST_S * pace
        assert client.seconds_until_closed() < CLOSED_S


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/abort_request", "/flush_cache"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_dripping_body_is_cut(path: str, chunked: bool) -> None:
    head = http_bytes("POST", path, b"", {"Content-Length": "100000"})
    drops = b" " * 1000
    if chunked:
        head, drops = head.replace(b"Content-Length: 100000", b"Transfer-Encoding: chunked"), b"1\r\n \r\n" * 200
    answer = b""
    with serving() as live, RawClient(live.port) as client:
        client.send(head)
        client.socket.settimeout(0.05)
        try:
            for drop in drops:
                client.send(bytes([drop]))
                with suppress(TimeoutError):
                    if not (piece := client.socket.recv(1 << 16)):
                        break
                    answer += piece
            else:
                pytest.fail("the drip was read to its end")
        except ConnectionError:
            pass
    if path != "/flush_cache":  # which needs no body and answers at once
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer


@at_some_pace
def test_a_body_that_comes_slowly_and_steadily_is_served(pace: float) -> None:
    body = COMPLETION + b" " * (512 << 10)
    with serving(pace) as live, RawClient(live.port) as client:
        client.send(http_bytes("POST", "/v1/completions", b"", {"Content-Length": str(len(body))}))
        started = time.monotonic()
        for start in range(0, len(body), 64 << 10):
            client.send(body[start : start + (64 << 10)])
            time.sleep(DEADLINE_S * pace / 3)
        assert client.read_reply().status == 200
        assert time.monotonic() - started > 2 * DEADLINE_S * pace


def test_a_body_that_nobody_reads_is_cut_too() -> None:
    with LiveServer() as live, RawClient(live.port) as client:
        client.send(http_bytes("GET", "/health", b"", {"Content-Length": "1000"}))
        assert client.read_reply().status == 200
        assert client.seconds_until_closed() < CLOSED_S


@at_some_pace
def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_TIMEOUT_S", DEADLINE_S * pace)
    least_s, most_s = (DEADLINE_S - 0.1) * pace, LATEST_S * pace
    with LiveServer() as live:
        with RawClient(live.port) as silent:
            assert least_s <= silent.seconds_until_closed() <= most_s
        with RawClient(live.port) as client:
            client.send(GET)
            client.read_reply()
            assert least_s <= client.seconds_until_closed() <= most_s


def test_a_reader_that_stalls_is_cut_and_its_request_cancelled() -> None:
    with serving() as live, RawClient(live.port, receive_buffer=4096) as client:
        client.send(http_bytes("POST", "/v1/completions", FLOOD))
        assert live.wait_until(lambda: len(live.ingress.opened) == 1, 2)
        assert live.wait_until(lambda: not live.runner.server.connections, LATEST_S)
        assert live.call(lambda: live.ingress.num_open) == 0
        with pytest.raises(ConnectionResetError):
            client.read_exactly(1 << 20)  # of eight megabytes, and more than all buffers hold


def test_readers_that_stall_after_the_last_byte_was_written_are_cut() -> None:
    """The handler is done, what is left sits in the transport, and closing that would wait for the client for ever.

    Some of these sizes fit the kernel's buffers, some leave more than the high-water mark, some less."""
    with serving() as live:
        clients = [RawClient(live.port, receive_buffer=4096) for _ in range(16)]
        for number, client in enumerate(clients):
            fields = {"model": MODEL, "prompt": "!flood", "max_tokens": 40 + 20 * number, "ignore_eos": True}
            body = json.dumps(fields).encode()
            client.send(http_bytes("POST", "/v1/completions", body, {"Connection": "close"}))
        for client in clients:
            client.read_until(b"\r\n\r\n")
        assert live.wait_until(lambda: not live.runner.server.connections, LATEST_S)
        with pytest.raises(ConnectionResetError):
            clients[-1].read_exactly(340 << 10)
        for client in clients:
            client.socket.close()


@at_some_pace
def test_a_slow_reader_that_reads_on_gets_everything(pace: float) -> None:
    body = json.dumps({"model": MODEL, "prompt": "!flood", "max_tokens": 800, "ignore_eos": True}).encode()
    with serving(pace) as live, RawClient(live.port, receive_buffer=4096) as client:
        client.send(http_bytes("POST", "/v1/completions", body))
        head = client.read_until(b"\r\n\r\n").lower()
        left = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        started = time.monotonic()
        while left > 400_000:
            left -= len(client.read_exactly(20_000))
            time.sleep(0.1 * pace)
        client.read_exactly(left)
        assert time.monotonic() - started > 3 * DEADLINE_S * pace


@at_some_pace
def test_a_stalled_reader_does_not_slow_the_others(pace: float) -> None:
    with LiveServer() as live, RawClient(live.port, receive_buffer=4096) as client:
        client.send(http_bytes("POST", "/v1/completions", FLOOD))
        client.read_until(b"data: ")
        for _ in range(20):
            started = time.monotonic()
            assert ask(live.port, "POST", "/v1/completions", COMPLETION).status == 200
            assert time.monotonic() - started < pace


def test_connections_beyond_the_cap_are_told_so() -> None:
    section = ServerSection(max_connections=3, max_connections_per_address=3)
    with LiveServer(server=section) as live:
        clients = [RawClient(live.port) for _ in range(3)]
        for client in clients:
            client.send(http_bytes("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "!hang"}).encode()))
        assert live.wait_until(lambda: live.ingress.num_open == 3, 5)
        with RawClient(live.port) as client:
            client.send(http_bytes("GET", "/v1/models"))
            reply = client.read_reply()
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
            assert reply.headers["retry-after"] == "1"
            assert client.seconds_until_closed() < CLOSED_S
        clients.pop().socket.close()
        assert live.wait_until(lambda: len(live.runner.server.connections) == 2, 1)
        assert ask(live.port, "GET", "/health").status == 200
        for client in clients:
            client.socket.close()


@at_some_pace
def test_idle_connections_do_not_disturb(pace: float) -> None:
    with LiveServer() as live:
        idle = [RawClient(live.port) for _ in range(300)]
        started = time.monotonic()
        assert ask(live.port, "POST", "/v1/completions", COMPLETION).status == 200
        assert time.monotonic() - started < pace
        for client in idle:
            client.socket.close()
