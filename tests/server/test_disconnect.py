"""Clients that leave: their requests end in the engine within a second, whatever they were waiting for."""

import json
import socket
import struct
import time

import pytest

from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer


def request_bytes(prompt: str, **fields: object) -> bytes:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 10_000, "ignore_eos": True, **fields}
    return http_bytes("POST", "/v1/completions", json.dumps(body).encode())


def assert_all_closed(live: LiveServer, num_streams: int) -> None:
    assert live.wait_until(lambda: live.ingress.num_open == 0, 1), "requests of clients that left go on"
    assert len(live.ingress.opened) == num_streams
    assert all(stream.ended for stream in live.ingress.opened)


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
@pytest.mark.parametrize("prompt", ["runs", "!hang"])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_cancels_the_request(stream: bool, prompt: str, n: int) -> None:
    # Of these, the ones that wait without writing would go on to the end if handlers were not cancelled.
    with LiveServer(FakeIngress(delay_s=0.02)) as live:
        with RawClient(live.port) as client:
            client.send(request_bytes(prompt, stream=stream, n=n, seed=1))
            assert live.wait_until(lambda: live.ingress.num_open == n, 2)
            if stream and prompt == "runs":
                client.read_until(b"data: ")
        assert_all_closed(live, n)


def test_a_reset_cancels_the_request() -> None:
    with LiveServer(FakeIngress(delay_s=0.02)) as live:
        client = RawClient(live.port)
        client.send(request_bytes("runs", stream=True))
        client.read_until(b"data: ")
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()
        assert_all_closed(live, 1)


def test_leaving_in_the_middle_of_a_body_opens_nothing() -> None:
    with LiveServer() as live:
        with RawClient(live.port) as client:
            client.send(request_bytes("runs")[:-10])
            time.sleep(0.1)
        assert ask(live.port, "GET", "/health").status == 200
        assert live.ingress.opened == []
        assert live.wait_until(lambda: live.runner.server is not None and not live.runner.server.connections, 1)


def test_half_of_many_streams_leave_and_the_others_get_all_their_text() -> None:
    def full(number: int) -> bytes:
        body = {"model": MODEL, "prompt": f"p{number}", "max_tokens": 40, "ignore_eos": True, "stream": True}
        return http_bytes("POST", "/v1/completions", json.dumps(body).encode())

    with LiveServer(FakeIngress(delay_s=0.01)) as live:
        clients = [RawClient(live.port) for _ in range(60)]
        for number, client in enumerate(clients):
            client.send(full(number))
        for client in clients:
            client.read_until(b"\r\n\r\n")
        for client in clients[::2]:
            client.socket.close()
        texts = []
        for client in clients[1::2]:
            client._buffer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + client._buffer
            with client:
                events = client.read_reply().events
                texts.append("".join(event["choices"][0]["text"] for event in events[:-1]))
        assert_all_closed(live, 60)
        live.ingress.delay_s = 0.0
        for number, text in zip(range(1, 60, 2), texts, strict=True):
            body = {"model": MODEL, "prompt": f"p{number}", "max_tokens": 40, "ignore_eos": True}
            assert ask(live.port, "POST", "/v1/completions", body).json["choices"][0]["text"] == text


def test_many_clients_that_connect_and_reset_leave_nothing_behind() -> None:
    with LiveServer() as live:
        for number in range(500):
            client = RawClient(live.port)
            if number % 2:
                client.send(request_bytes("!hang", stream=True))
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.socket.close()
        assert ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": "p"}).status == 200
        assert live.wait_until(lambda: live.ingress.num_open == 0, 2)
        assert live.wait_until(lambda: live.runner.server is not None and not live.runner.server.connections, 2)
