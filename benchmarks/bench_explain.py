"""Do the parts that GET /explain/{id} tells add up to what the client has measured, whatever happened to a request?

A real server of the demo model with a small pool, its executor in a process of its own.  200 requests, up to 24 at
once: short and long prompts, some with a common beginning, grammars, several choices, answers in one piece and streams,
and clients that read slowly.  In the middle the executor is killed.  For every request the sum of the parts is compared
with the time from sending it to its last byte; one that is off by more than 2 % and 2 ms makes this script fail.

    python benchmarks/bench_explain.py --json benchmarks/results/explain_2core_cpu.json
    python benchmarks/bench_explain.py --requests 40      # a smoke run
"""

import argparse
import asyncio
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
from collections import Counter
from pathlib import Path
from typing import Any

from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SHARE = 0.02
AT_ONCE = 24
CONFIG = """
[model]
path = "{model}"
name = "demo"
[scheduler]
max_running = 16
[kv]
num_pages = {pages}
[placement]
executor = "process"
ingress = "{ingress}"
tokenizers = {tokenizers}
[server]
port = {port}
"""
WORDS = ("import sys", "def total(values):", "class Platform:", "What is a page?", "for name in sorted(names):")
KINDS = ("short", "short", "long", "shared", "shared", "grammar", "choices", "whole", "slow")


def body(kind: str, rng: random.Random) -> dict[str, Any]:
    """What a request of that kind asks."""
    words = rng.choice(WORDS)
    asked: dict[str, Any] = {"model": "demo", "prompt": words, "max_tokens": rng.randint(20, 200), "stream": True}
    asked |= {"ignore_eos": True, "temperature": 1.0, "seed": rng.randint(0, 99)}
    match kind:
        case "long":
            asked["prompt"] = [rng.randint(3, 250) for _ in range(rng.randint(200, 500))]
        case "shared":
            asked["prompt"] = [*range(3, 250), rng.randint(3, 250)]
        case "grammar":
            return asked | {"ignore_eos": False, "guided_regex": f"[a-z]{{5,{rng.randint(30, 200)}}}"}
        case "choices":
            return asked | {"n": 3}
        case "whole":
            return asked | {"stream": False}
        case "slow":
            return asked | {"logprobs": 20, "max_tokens": 120}
    return asked


async def ask(port: int, name: str, kind: str, asked: dict[str, Any]) -> float:
    """Seconds from sending a request to the last byte of its answer."""
    client = socket.socket()
    if kind == "slow":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    text = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\nContent-Type: application/json\r\n"
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    sent_at = time.monotonic()
    await loop.sock_sendall(client, head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text)
    answer = b""
    while not is_whole(answer):
        if kind == "slow":
            await asyncio.sleep(0.01)
        data = await loop.sock_recv(client, 1024 if kind == "slow" else 1 << 16)
        assert data, f"{name}: the connection ended: {answer[-300:]!r}"
        answer += data
    took = time.monotonic() - sent_at
    assert b" 200 OK" in answer[:20], answer[:400]
    assert b'"error"' not in answer[-300:], answer[-300:]
    await asyncio.sleep(0.1)  # the server has noticed by then that all was read
    client.close()
    return took


def is_whole(answer: bytes) -> bool:
    """Whether this is all of a response: chunked, or with its length said."""
    head, end, rest = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if b"chunked" in head:
        return rest.endswith(b"0\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return len(rest) >= int(length.split(b":")[1])


async def explanation(port: int, name: str) -> dict[str, Any]:
    """What the server says of a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /explain/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 OK" in head[:20], f"{name}: {text!r}"
    told: dict[str, Any] = json.loads(text)
    return told


async def run(port: int, pid: int, num_requests: int, seed: int) -> list[dict[str, Any]]:
    """One row for each request."""
    rng = random.Random(seed)
    room = asyncio.Semaphore(AT_ONCE)
    num_done = 0

    async def one(number: int) -> dict[str, Any]:
        nonlocal num_done
        kind = KINDS[number % len(KINDS)]
        asked = body(kind, rng)
        async with room:
            await asyncio.sleep(0.05 * rng.random())
            took = await ask(port, f"bench-{number}", kind, asked)
        num_done += 1
        if num_done == num_requests // 2:
            kill_executor(pid)
        told = await explanation(port, f"bench-{number}")
        parts = {part["name"]: part["seconds"] for part in told["parts"]}
        return {"number": number, "kind": kind, "measured_s": took, "parts": parts, "texts": told["parts"]}

    return await asyncio.gather(*(one(number) for number in range(num_requests)))


def kill_executor(pid: int) -> None:
    """The first child is the executor, unless others are asked for; its command line says so."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if "executor" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
                return
    raise RuntimeError("there is no executor to kill")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def serve_and_run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the server, send the requests, end it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        split = arguments.split
        config.write_text(
            CONFIG.format(
                model=ROOT / "examples/demo_model",
                pages=arguments.pages,
                port=port,
                ingress="process" if split else "inline",
                tokenizers=1 if split else 0,
            )
        )
        command = [sys.executable, "-m", "callboard", "serve", str(config)]
        log = (Path(folder) / "log").open("w+")
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while not is_ready(port):
                if time.monotonic() > deadline or server.poll() is not None:
                    raise RuntimeError((Path(folder) / "log").read_text()[-2000:])
                time.sleep(0.2)
            return asyncio.run(run(port, server.pid, arguments.requests, arguments.seed))
        finally:
            server.terminate()
            server.wait(60)
            log.close()


def is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as one:
            one.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in one.recv(100)
    except OSError:
        return False


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--pages", type=int, default=120, help="of the pool: few, so that requests are retracted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--least-ms", type=float, default=2.0, help="that an explanation may be off, however short the request"
    )
    parser.add_argument("--split", action="store_true", help="HTTP and the tokenizer in processes of their own")
    arguments = parser.parse_args()
    rows = serve_and_run(arguments)
    seconds: Counter[str] = Counter()
    worst: list[tuple[float, float, dict[str, Any]]] = []
    for row in rows:
        seconds.update(row["parts"])
        off = row["measured_s"] - sum(row["parts"].values())
        worst.append((abs(off) / row["measured_s"], off, row))
    worst.sort(key=lambda one: -one[0])
    failed = [one for one in worst if abs(one[1]) > max(SHARE * one[2]["measured_s"], arguments.least_ms / 1000)]
    table = Table("part", "seconds of all", "requests with it")
    for name, total in seconds.most_common():
        table.add_row(name, f"{total:.2f}", str(sum(name in row["parts"] for row in rows)))
    console = Console()
    console.print(table)
    shares = [share for share, *_ in worst]
    figures = {
        "requests": len(rows),
        "off_by_more_than_2_percent_and_2_ms": len(failed),
        "worst_share": shares[0],
        "median_share": statistics.median(shares),
        "measured_s": {"median": statistics.median(row["measured_s"] for row in rows)},
        "parts_s": {name: round(total, 3) for name, total in seconds.most_common()},
        "requests_with_part": {name: sum(name in row["parts"] for row in rows) for name in seconds},
    }
    console.print(
        f"{len(rows)} requests; parts and client differ by {100 * statistics.median(shares):.2f} % in the median, "
        f"{100 * shares[0]:.2f} % at most"
    )
    keep(arguments.output, figures)
    if failed:
        for share, off, row in failed[:10]:
            console.print(
                f"{row['number']}, {row['kind']}: off by {1000 * off:.1f} ms, {100 * share:.2f} %: {row['parts']}"
            )
        sys.exit(f"{len(failed)} explanations do not add up")


if __name__ == "__main__":
    main()
