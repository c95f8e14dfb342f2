"""Clients that behave badly, by the hundred, on a whole engine whose device computes nothing.

The others get every token, and nothing that the bad ones held is still held a second after they have left.
"""

import asyncio
import gc
import json
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.null_engine import NullSystem
from engine.actors.snapshot import Gauges
from engine.config import Config, build_config
from server.clients import MOST_ENDED
from tests.figures import Figure
from tests.pace import at_some_pace, far
from tests.server.http_client import RawClient, http_bytes
from tests.server.live_system import MODEL, LiveSystem

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
NUM_IDLE = 2000
FILES_FOR_IDLE = 2 * NUM_IDLE + 500  # both ends are here


def configured(**sections: dict[str, Any]) -> Config:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(DEMO), "name": MODEL},
        "kv": {"num_pages": 4096},
        "scheduler": {"max_running": 256},
        **sections,
    }
    tables["server"] = {
        "max_connections": 2 * NUM_IDLE,
        "max_connections_per_address": 2 * NUM_IDLE,
        **tables.get("server", {}),
    }
    return build_config(Config(), tables)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveSystem]:
    with LiveSystem(configured(), NullSystem) as running:
        yield running


def streaming(prompt: str, max_tokens: int) -> bytes:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return http_bytes("POST", "/v1/completions", json.dumps(fields).encode())


def read_stream(client: RawClient) -> tuple[str, int]:
    """(text, number of tokens) of a whole stream."""
    events = client.read_reply().events
    assert events[-1] == "[DONE]"
    texts = [event["choices"][0]["text"] for event in events[:-1] if event["choices"]]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    return "".join(texts), len(texts)


def reset(client: RawClient) -> None:
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()


def seconds_until_all_gone(live: LiveSystem) -> float:
    """Until nothing is open, running or held."""
    started = time.monotonic()
    assert live.wait_until(lambda gauges: (gauges.num_open, gauges.num_running, gauges.pages_used) == (0, 0, 0), 10)
    return time.monotonic() - started


@pytest.mark.reliability("H2", "200 streams, of which half leave at random")
def test_half_of_two_hundred_streams_vanish_and_the_others_get_every_token(live: LiveSystem, figure: Figure) -> None:
    dice = random.Random(5)
    clients = [RawClient(live.port) for _ in range(200)]
    for number, client in enumerate(clients):
        client.send(streaming(f"client {number} asks ", 60 + number % 40))
    leaving = set(dice.sample(range(200), 100))
    for number in leaving:
        if dice.random() < 0.5:
            clients[number].read_until(b"data: ")
        (reset if dice.random() < 0.5 else lambda client: client.socket.close())(clients[number])
    alone = live.call(lambda: live.system.codec.encode(" return")[-1])
    word = live.call(lambda: live.system.codec.decode([int(alone)]))
    num_whole = 0
    for number, client in enumerate(clients):
        if number not in leaving:
            with client:
                num_whole += read_stream(client)[0] == word * (60 + number % 40)
    figure("whole streams of those that stayed", num_whole, at_least=100)
    figure("until nothing is held", seconds_until_all_gone(live), "s", at_most=1, patience=5)


@pytest.mark.reliability("H2", "clients that leave in the middle of their stream")
def test_an_abort_reaches_the_scheduler_within_a_step(figure: Figure) -> None:
    most_steps, longest_s = 0, 0.0
    with LiveSystem(configured(), partial(NullSystem, step_s=0.002)) as live:
        for _ in range(10):
            with RawClient(live.port) as other:
                client = RawClient(live.port)
                for one in (other, client):
                    one.send(streaming("goes on ", 1900))  # for four seconds
                    one.read_until(b"data: ")
                assert live.wait_until(lambda gauges: gauges.num_running == 2, 1)
                counting = live.call(lambda: _steps_until_one_is_left(live))
                started = time.monotonic()
                client.socket.close()
                most_steps = max(most_steps, counting.result(far(10)))
                longest_s = max(longest_s, time.monotonic() - started)
            seconds_until_all_gone(live)
    # Steps in flight when it left (two), and the one in which the message was under way.
    figure("until the scheduler has let go", most_steps, "steps", at_most=3)
    figure("until the scheduler has let go, from the close", longest_s, "s", at_most=1, patience=5)


def _steps_until_one_is_left(live: LiveSystem) -> Future[int]:
    """The number of steps from ingress's cancellation until the scheduler has let go."""
    monitor = live.system.monitor

    async def count() -> int:
        assert monitor.gauges().num_open == monitor.gauges().num_running == 2
        while monitor.gauges().num_open == 2:
            await asyncio.sleep(0)
        meter = monitor.meter
        assert meter is not None
        before = meter.num_steps
        while monitor.gauges().num_running == 2:
            await asyncio.sleep(0)
        assert monitor.gauges().num_running == 1
        return meter.num_steps - before

    return asyncio.run_coroutine_threadsafe(count(), live._loop)


def unsent_bytes(live: LiveSystem) -> list[int]:
    """Of each connection, in this process.  To be called on the server's loop."""
    server = live.runner.server
    assert server is not None
    transports = [connection.transport for connection in server.connections]
    return [transport.get_write_buffer_size() for transport in transports if transport is not None]


@pytest.mark.reliability("H2", "30 readers that stop reading streams of half a megabyte")
def test_readers_that_stop_are_bounded_in_memory_then_dropped_and_slow_nobody(figure: Figure) -> None:
    config = configured(server={"client_timeout_s": 2.0})  # they are looked at before they are cut
    with LiveSystem(config, NullSystem) as live, ExitStack() as stack:
        stalled = [stack.enter_context(RawClient(live.port, receive_buffer=4096)) for _ in range(30)]
        for client in stalled:
            client.send(streaming("reads nothing ", 1900))
        healthy = stack.enter_context(RawClient(live.port))
        healthy.send(streaming("reads ", 300))
        assert read_stream(healthy)[1] == 300
        fullest = 0

        def all_is_produced(gauges: Gauges) -> bool:
            """Or the clients were cut; neither is waited for."""
            nonlocal fullest
            fullest = max(fullest, *unsent_bytes(live), 0)
            return gauges.num_running == 0

        assert live.wait_until(all_is_produced, 10)
        figure("unsent bytes of a connection", fullest / 1024, "KiB", at_most=128)
        assert live.wait_until(lambda gauges: gauges.num_open == 0, 10)
        assert fullest > 32 << 10, "nobody was slow"


@pytest.mark.reliability("H2", "a burst of 600 requests where 512 are taken")
def test_a_burst_beyond_the_limits_is_served_or_refused_and_never_left_hanging(
    live: LiveSystem, figure: Figure
) -> None:
    num_clients = live.system.config.limits.max_requests + 88
    statuses: list[int] = []
    lock = threading.Lock()
    clients = [RawClient(live.port, timeout_s=20) for _ in range(num_clients)]

    def read(client: RawClient) -> None:
        with client:
            reply = client.read_reply()
        with lock:
            statuses.append(reply.status)
            if reply.status == 429:
                assert int(reply.headers["retry-after"]) >= 1

    for client in clients:
        client.send(streaming("one of very many ", 40))
    threads = [threading.Thread(target=read, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(far(30))
    assert set(statuses) <= {200, 429}
    figure("answered", len(statuses), at_least=num_clients)
    assert statuses.count(200) >= live.system.config.limits.max_requests // 2
    figure("until nothing is held", seconds_until_all_gone(live), "s", at_most=1, patience=5)


@pytest.mark.reliability("H2", "2,000 connections that reset, before, within and after their request")
def test_two_thousand_connections_that_reset_leave_nothing_behind(live: LiveSystem, figure: Figure) -> None:
    for number in range(2000):
        client = RawClient(live.port)
        if number % 2:
            client.send(streaming("gone before it began ", 400)[: None if number % 4 == 1 else 50])
        reset(client)
    assert live.complete([1, 2, 3], max_tokens=2).status == 200
    figure("until nothing is held", seconds_until_all_gone(live), "s", at_most=1, patience=5)
    assert live.call(lambda: live.system.monitor.gauges().mailboxes[0].waiting) == 0


@pytest.mark.reliability("H2", "2,000 idle connections")
def test_idle_connections_by_the_thousand_cost_others_nothing(live: LiveSystem, figure: Figure) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES_FOR_IDLE:
        pytest.skip(f"at most {hard} open files are allowed here")
    with ExitStack() as stack:
        if soft < FILES_FOR_IDLE:
            resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_FOR_IDLE, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(NUM_IDLE):
            stack.enter_context(RawClient(live.port))
        assert live.wait_until(lambda _: live.runner.server.num_open >= NUM_IDLE, 10)  # type: ignore[union-attr]
        started = time.monotonic()
        assert live.complete([1, 2, 3], max_tokens=4).status == 200
        figure("another's request", time.monotonic() - started, "s", at_most=0.5, patience=10)


@pytest.mark.reliability("H2", "50 slow headers and 50 slow bodies")
@at_some_pace
def test_slow_headers_and_bodies_are_cut_at_their_deadlines_while_others_are_served(
    figure: Figure, pace: float
) -> None:
    config = configured(server={"client_timeout_s": 0.6 * pace})
    head = http_bytes("POST", "/v1/completions", b"", {"Content-Length": "1000"})
    with LiveSystem(config, NullSystem) as live, ExitStack() as stack:
        drips = [stack.enter_context(RawClient(live.port)) for _ in range(100)]
        started = time.monotonic()
        for number, client in enumerate(drips):
            client.send(head[:40] if number % 2 else head)
        while time.monotonic() - started < 0.4 * pace:
            assert live.complete([1, 2, 3], max_tokens=2).status == 200
            for number, client in enumerate(drips):
                with suppress(ConnectionError):  # cut already, on a busy machine
                    client.send(b"x" if number % 2 else b" ")
        for client in drips:
            assert client.read_reply().status == 408
        late_s = time.monotonic() - started - 0.6 * pace
    figure("last one cut after its deadline", late_s, "s", at_most=1, patience=5)


@pytest.mark.reliability("H2", "500 requests at once on one connection")
def test_five_hundred_requests_in_one_go_are_answered_in_order(live: LiveSystem, figure: Figure) -> None:
    fields = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    bodies = [json.dumps({**fields, "prompt": [5] * (1 + n % 7), "max_tokens": 1 + n % 5}).encode() for n in range(500)]
    with RawClient(live.port, timeout_s=30) as client:
        client.send(b"".join(http_bytes("POST", "/v1/completions", body) for body in bodies))
        usages = [client.read_reply().json["usage"] for _ in bodies]
    counts = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]
    in_order = [one == (1 + n % 7, 1 + n % 5) for n, one in enumerate(counts)]
    figure("answered, in order", sum(in_order), at_least=500)


@pytest.mark.reliability("H3", "1,500 requests after the first 4,600")
def test_thousands_of_requests_leave_no_object_behind(live: LiveSystem, figure: Figure) -> None:
    fields = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    batch = b"".join(
        http_bytes("POST", "/v1/completions", json.dumps({**fields, "stream": number % 2 == 0}).encode())
        for number in range(100)
    )

    def serve(count: int) -> int:
        for _ in range(count // 100):
            with RawClient(live.port) as client:
                client.send(batch)
                assert all(client.read_reply().status == 200 for _ in range(100))
        seconds_until_all_gone(live)
        gc.collect()
        return len(gc.get_objects())

    before = serve(MOST_ENDED + 500)  # what is remembered of the last requests is there then
    figure("objects left by a request", (serve(1500) - before) / 1500, at_most=0.1)


def test_an_old_client_gets_its_stream_without_chunks(live: LiveSystem) -> None:
    with RawClient(live.port) as client:
        client.send(streaming("speaks HTTP/1.0 ", 20).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head = client.read_until(b"\r\n\r\n").lower()
        assert b"transfer-encoding" not in head
        body = b""
        while chunk := client.socket.recv(1 << 16):
            body += chunk
    events = (client._buffer + body).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) == 20 + 2
