"""What do healthy clients notice of bad ones, and what do those leave behind?

500 concurrent streams on the demo model, twice: all of them healthy, and then with a third of the clients vanishing in
the middle and a tenth reading slowly.  For the healthy ones: the time between two events, its 99th percentile in either
run.  For the engine: what is open, running and held in pages a second after the last healthy client is done, how much
memory it has taken, and how many steps it took until an abort had reached the scheduler.

    python benchmarks/bench_abuse.py
    python benchmarks/bench_abuse.py --streams 200 --tokens 30
"""

import argparse
import json
import random
import re
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_memory import memory
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from server.local_token import read_token

ROOT = Path(__file__).parents[1]
MODEL = "callboard-demo"
SLOW_READ_BYTES, SLOW_READ_S = 200, 0.2
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
LIMIT = 2.0  # p99 of the healthy ones beside bad ones, as a multiple of what it is without


@dataclass(slots=True)
class Client:
    """kind: healthy, vanishing or slow.  leave_after: events that a vanishing one waits for."""

    socket: socket.socket
    kind: str
    leave_after: int
    num_events: int = 0
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tail: bytes = b""

    def reads(self, num_bytes: int = 1 << 16) -> bool:
        """Take what is there; returns whether there may be more."""
        try:
            data = self.socket.recv(num_bytes)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        now = time.perf_counter()
        if events := data.count(b"\n\n"):
            if self.num_events:
                self.gaps.append(now - self.last_at)
            self.last_at = now
            self.num_events += events
        self.tail = (self.tail + data)[-len(END) :]
        return bool(data)

    def leave(self) -> None:
        """As a machine that is switched off would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Server:
    """``callboard serve`` with the demo model."""

    def __init__(self, max_requests: int) -> None:
        settings = {"limits.max_requests": max_requests, "scheduler.max_running": 64, "kv.num_pages": 8192}
        command = [sys.executable, "-m", "server.cli", "serve", str(ROOT / "examples" / "demo.toml"), "--port", "0"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        command += ["--log-level", "warning"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", line := self._process.stdout.readline())) is None:
            assert line or self._process.poll() is None, "the server did not start"
        self.port, self.pid = int(found[1]), self._process.pid

    def stats(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {read_token()}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/stats", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            stats: dict[str, Any] = json.load(response)
        return stats

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def open_clients(port: int, count: int, num_tokens: int, kinds: dict[str, float]) -> list[Client]:
    """Everybody asks at once; whose kind is what is drawn from a fixed seed."""
    dice = random.Random(3)
    clients = []
    for number in range(count):
        draw, kind = dice.random(), "healthy"
        for name, share in kinds.items():
            if draw < share:
                kind = name
                break
            draw -= share
        fields = {"model": MODEL, "prompt": f"def function_{number}(a, b):\n", "max_tokens": num_tokens}
        body = json.dumps({**fields, "ignore_eos": True, "stream": True, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        client = socket.socket()
        if kind == "slow":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        client.setblocking(False)
        clients.append(Client(client, kind, dice.randrange(0, num_tokens // 2)))
    return clients


def drive(clients: list[Client]) -> float:
    """Until every healthy client has its whole stream; returns the seconds that took."""
    selector = selectors.EpollSelector()
    slow = [client for client in clients if client.kind == "slow"]
    for client in clients:
        if client.kind != "slow":
            selector.register(client.socket, selectors.EVENT_READ, client)
    left = sum(client.kind == "healthy" for client in clients)
    started = slow_at = time.perf_counter()
    while left:
        for key, _ in selector.select(SLOW_READ_S):
            client: Client = key.data
            if client.reads() and not (client.kind == "vanishing" and client.num_events >= client.leave_after):
                continue
            left -= client.kind == "healthy"
            selector.unregister(client.socket)
            client.leave()
        if time.perf_counter() >= slow_at:
            slow_at += SLOW_READ_S
            slow = [client for client in slow if client.reads(SLOW_READ_BYTES)]
    for client in clients:
        client.socket.close()
    return time.perf_counter() - started


def run(server: Server, arguments: argparse.Namespace, kinds: dict[str, float]) -> dict[str, Any]:
    """One load, and what is left of it a second later."""
    clients = open_clients(server.port, arguments.streams, arguments.tokens, kinds)
    seconds = drive(clients)
    time.sleep(1.0)
    stats = server.stats()
    healthy = [client for client in clients if client.kind == "healthy"]
    gaps = [gap for client in healthy for gap in client.gaps]
    return {
        "healthy": len(healthy),
        "vanishing": sum(client.kind == "vanishing" for client in clients),
        "slow": sum(client.kind == "slow" for client in clients),
        "complete": sum(client.tail == END for client in healthy),
        "seconds": round(seconds, 2),
        "itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
        "itl_p99_ms": round(statistics.quantiles(gaps, n=100)[98] * 1e3, 2),
        "left_open": stats["requests"]["open"],
        "left_running": stats["requests"]["running"],
        "left_pages": stats["pages"]["used"],
        "memory_mb": round(memory(server.pid) / 1e6, 1),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    server = Server(arguments.streams + 16)
    run(server, arguments, {})  # to warm up
    rows: list[tuple[str, dict[str, Any]]] = []
    for _ in range(arguments.turns):
        rows.append(("all healthy", run(server, arguments, {})))
        rows.append(("with bad ones", run(server, arguments, {"vanishing": 1 / 3, "slow": 0.1})))
    server.close()
    table = Table("clients", *rows[0][1])
    for name, row in rows:
        table.add_row(name, *map(str, row.values()))
    Console(width=160).print(table)
    clean, abused = (
        [row["itl_p99_ms"] for name, row in rows if name == kind] for kind in ("all healthy", "with bad ones")
    )
    ratio = statistics.median(abused) / statistics.median(clean)
    print(f"p99 between events of the healthy ones: {ratio:.2f} times what it is without bad ones")
    keep(arguments.output, {"ratio": round(ratio, 3), "runs": [{"clients": n, **r} for n, r in rows]})
    leaked = [row for _, row in rows if row["left_running"] or row["left_pages"] or row["left_open"]]
    incomplete = [row for _, row in rows if row["complete"] != row["healthy"]]
    if ratio > LIMIT or leaked or incomplete:
        sys.exit("healthy clients suffer, or bad ones leave something behind")


if __name__ == "__main__":
    main()
