"""The router with long prompts, many at once, before replicas that answer at once: what it adds, beside HAProxy.

    python benchmarks/bench_router.py --haproxy /usr/sbin/haproxy --json benchmarks/results/router_2core_cpu.json

A process is all replicas: each listens on a port of its own, reads the body and answers with four events of a stream,
marked as replicas mark them.  The router is the one of ``callboard serve --replicas N`` without Ray.  The same clients
send the same bodies to one replica's port, through HAProxy (round robin), and through the router, in turns.  Processor
time is that of the process between, as /proc has it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.config import Config

EVENTS = 4
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
WORDS = ("a", "page", "of", "the", "pool", "holds", "sixteen", "tokens", "and", "a", "tree", "finds", "them", "again")


def streamed() -> bytes:
    """What a replica answers."""
    events = [
        b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"token"}}]}\n\n: 0 01000000 %d %d 1\n\n' % (0, 9)
        for _ in range(EVENTS - 1)
    ]
    events.append(
        b'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n: 0 01000000 2 9 1\n\n'
    )
    whole = b"".join(events) + b"data: [DONE]\n\n"
    return ANSWER % len(whole) + whole


class Stub(asyncio.Protocol):
    """A connection to a replica that has the answer ready."""

    reply = streamed()

    def connection_made(self, transport: Any) -> None:
        self._transport, self._left, self._head = transport, 0, b""

    def data_received(self, data: bytes) -> None:
        while data:
            if self._left:
                taken = min(self._left, len(data))
                self._left, data = self._left - taken, data[taken:]
                if not self._left:
                    self._transport.write(self.reply)
                continue
            self._head += data
            data = b""
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            if head.startswith(b"GET"):
                body = b"{}" if b"/ready" in head else b""
                status = b"200 OK" if b"/ready" in head else b"404 Not Found"
                self._transport.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            else:
                lower = head.lower()
                at = lower.index(b"content-length:") + 15
                self._left = int(lower[at:].split(b"\r\n")[0])
            data = rest


async def stubs(count: int) -> None:
    """Listen on so many ports and print them, for ever."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Stub, "127.0.0.1", 0, backlog=512) for _ in range(count)]
    print(json.dumps([one.sockets[0].getsockname()[1] for one in servers]), flush=True)
    await asyncio.Event().wait()


class Ports:
    """A fleet of replicas that are there already.  headers, size: see ``Fleet``."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, ports: list[int]) -> None:
        self._ports, self.size = ports, len(ports)

    async def url(self, number: int) -> str:
        """Return where a replica is."""
        return f"http://127.0.0.1:{self._ports[number]}"

    async def stop(self, number: int) -> None:
        """Do nothing."""

    async def start(self, number: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


async def router(ports: list[int], port: int) -> None:
    """Be a router, on a port that others share."""
    from server.extensions.replicas.router import routing
    from server.http.listener import bind

    with bind("127.0.0.1", port, is_shared=True) as listener:
        async with routing(Config(), Ports(ports), listener):
            await asyncio.sleep(2.0)
            print(listener.getsockname()[1], flush=True)
            await asyncio.Event().wait()


def body_of(size: int, number: int) -> bytes:
    """A request for a stream, with a prompt of that many bytes; one of 20 documents, and a question."""
    rng = random.Random(number % 20)
    words, length = [], 0
    while length < size:
        words.append(rng.choice(WORDS))
        length += len(words[-1]) + 1
    text = " ".join(words) + f" question {number}"
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    ).encode()


async def load(port: int, bodies: list[bytes], count: int, at_once: int) -> tuple[float, list[float]]:
    """Send so many requests, so many at once; return requests a second and the times to first bytes."""
    waits: list[float] = []
    numbers = iter(range(count))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for number in numbers:
            body = bodies[number % len(bodies)]
            began = time.perf_counter()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answered = await reader.readuntil(b"\r\n\r\n")
            waits.append(time.perf_counter() - began)
            await reader.readuntil(b"data: [DONE]\n\n")
            if b"chunked" in answered.lower():
                await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return count / (time.perf_counter() - began), waits


def cpu_s(pid: int) -> float:
    """The processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process, for as long as the context lasts."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def haproxy(binary: Path, ports: list[int]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """HAProxy before the replicas; gives it and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = "\n".join(f"  server r{number} 127.0.0.1:{one}" for number, one in enumerate(ports))
    timeouts = "  timeout connect 5s\n  timeout client 60s\n  timeout server 60s"
    text = f"global\n  nbthread 1\n  maxconn 4000\ndefaults\n  mode http\n{timeouts}\n  option http-keep-alive\n"
    text += f"frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n  balance roundrobin\n{servers}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(text)
        file.flush()
        with running([str(binary), "-db", "-f", file.name]) as process:
            for _ in range(100):
                time.sleep(0.1)
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield process, port


def main() -> None:
    """Measure each way in turns and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--haproxy", type=Path, help="its binary; without it, that row is left out")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=220_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stubs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--routers", type=int, default=1, help="processes of the router, which share its port")
    parser.add_argument("--router", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stubs:
        asyncio.run(stubs(arguments.replicas))
    if arguments.router:
        import uvloop

        uvloop.run(router(json.loads(arguments.router), arguments.port))
    bodies = [body_of(arguments.bytes, number) for number in range(60)]
    own = [sys.executable, __file__]
    with contextlib.ExitStack() as stack:
        stub = stack.enter_context(running([*own, "--stubs", "--replicas", str(arguments.replicas)]))
        assert stub.stdout is not None
        ports: list[int] = json.loads(stub.stdout.readline())
        routers: list[subprocess.Popen[str]] = []
        shared_port = 0
        for _ in range(arguments.routers):
            command = [*own, "--router", json.dumps(ports), "--port", str(shared_port)]
            routers.append(stack.enter_context(running(command)))
            told = routers[-1].stdout
            assert told is not None
            shared_port = int(told.readline())
        ways: dict[str, tuple[int, list[int]]] = {"directly": (ports[0], [])}
        if arguments.haproxy:
            process, port = stack.enter_context(haproxy(arguments.haproxy, ports))
            ways["HAProxy"] = port, [process.pid]
        ways["callboard's router"] = shared_port, [one.pid for one in routers]
        rows: dict[str, dict[str, list[float]]] = {way: {"rate": [], "first": [], "cpu_ms": []} for way in ways}
        for _ in range(arguments.rounds):
            for way, (port, pids) in ways.items():
                asyncio.run(load(port, bodies, arguments.at_once, arguments.at_once))
                before = sum(map(cpu_s, pids))
                rate, waits = asyncio.run(load(port, bodies, arguments.requests, arguments.at_once))
                used = sum(map(cpu_s, pids)) - before
                rows[way]["rate"].append(rate)
                rows[way]["first"].append(1e3 * statistics.median(waits))
                rows[way]["cpu_ms"].append(1e3 * used / arguments.requests)
    table = Table("way", "requests/s", "first byte, median ms", "CPU between, ms a request", "us a token")
    best = {
        way: {name: (max if name == "rate" else min)(values) for name, values in row.items()}
        for way, row in rows.items()
    }
    for way, row in best.items():
        table.add_row(
            way,
            f"{row['rate']:.0f}",
            f"{row['first']:.0f}",
            f"{row['cpu_ms']:.2f}",
            f"{1e3 * row['cpu_ms'] / EVENTS:.0f}",
        )
    Console().print(table)
    if "HAProxy" in best:
        ratio = best["callboard's router"]["cpu_ms"] / max(best["HAProxy"]["cpu_ms"], 0.01)
        print(f"processor time of the router over HAProxy's: {ratio:.1f}")
    keep(arguments.output, {"bytes": arguments.bytes, "at_once": arguments.at_once, "best": best, "rounds": rows})


if __name__ == "__main__":
    main()
