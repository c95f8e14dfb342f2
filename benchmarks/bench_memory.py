"""Does the server's memory grow with the number of requests it has served?

100,000 short requests over 64 kept-alive connections, every tenth one streamed, every hundredth one wrong, on an engine
whose device computes nothing.  Resident memory that is anonymous (and what was swapped out) is read after every tenth
of them; from the first reading on it must stay flat.

    python benchmarks/bench_memory.py
    python benchmarks/bench_memory.py --requests 20000
"""

import json
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

from bench_server import MODEL, Server
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

NUM_CONNECTIONS = 64
LIMIT = 1.05  # what there may be at the end, as a share of what there was after the first tenth
LIMIT_BYTES = 20  # and so much for each request, by a line through all readings after it


def request(number: int) -> bytes:
    """The next one: prompts differ, so that the prefix cache has something to do."""
    prompt = [10 + number % 50, 10 + number // 50 % 50, *range(10, 14 + number % 9)]
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 1 + number % 4, "ignore_eos": True}
    fields["stream"] = number % 10 == 0
    if number % 100 == 1:
        fields["temperature"] = -1
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


class Connection:
    """Sends one request after the other, each when the one before it was answered."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._buffer = b""

    def send(self, number: int) -> None:
        self._buffer = b""
        self.socket.sendall(request(number))

    def answered(self) -> int | None:
        """The status, once the response is complete."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed a connection")
        self._buffer += data
        head, mark, body = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return None
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            complete = body.endswith(b"\r\n0\r\n\r\n")
        else:
            length = lower.partition(b"content-length:")[2].partition(b"\r\n")[0]
            complete = len(body) >= int(length)
        return int(head.split(b" ", 2)[1]) if complete else None


def run(server: Server, num_requests: int) -> dict[str, Any]:
    """Everything, with a reading after each tenth: (requests, bytes, tasks, connections)."""
    selector = selectors.EpollSelector()
    sent = answered = 0
    statuses: dict[int, int] = {}
    readings: list[dict[str, Any]] = []
    for _ in range(NUM_CONNECTIONS):
        connection = Connection(server.port)
        connection.send(sent)
        sent += 1
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    started = time.perf_counter()
    while answered < num_requests:
        for key, _ in selector.select(10):
            status = key.data.answered()
            if status is None:
                continue
            answered += 1
            statuses[status] = statuses.get(status, 0) + 1
            if answered % (num_requests // 10) == 0:
                report = server.report()
                readings.append({"requests": answered, "bytes": memory(server.pid), "tasks": report["tasks"]})
            if sent < num_requests:
                key.data.send(sent)
                sent += 1
    seconds = time.perf_counter() - started
    for key in list(selector.get_map().values()):
        key.data.socket.close()
    return {"requests_per_s": num_requests / seconds, "statuses": statuses, "readings": readings}


def memory(pid: int) -> int:
    """Bytes of a process that no file stands behind, swapped out or not."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


def growth_per_request(readings: list[dict[str, Any]]) -> float:
    """Slope of a least-squares line through the readings, in bytes."""
    xs, ys = [one["requests"] for one in readings], [one["bytes"] for one in readings]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return float(sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    server = Server("callboard", "--pages", "1024", core=None)
    result = run(server, arguments.requests)
    server.close()
    first, last = result["readings"][0]["bytes"], result["readings"][-1]["bytes"]
    result |= {"ratio": round(last / first, 4), "bytes_per_request": round(growth_per_request(result["readings"]), 2)}
    table = Table("requests", "MB", "tasks")
    for reading in result["readings"]:
        table.add_row(f"{reading['requests']:,}", f"{reading['bytes'] / 1e6:.2f}", str(reading["tasks"]))
    console = Console()
    console.print(table)
    console.print(f"{result['requests_per_s']:,.0f} requests/s, statuses {result['statuses']}")
    console.print(f"grew to {result['ratio']:.3f} of the first reading; {result['bytes_per_request']} bytes a request")
    keep(arguments.output, result)
    if result["ratio"] > LIMIT or result["bytes_per_request"] > LIMIT_BYTES:
        sys.exit("memory grows")


if __name__ == "__main__":
    main()
