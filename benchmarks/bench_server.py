"""How many tokens per second can be streamed through HTTP, and what does each part of the way cost per token?

The engine runs on a device that computes nothing (``null_engine.py``), so what is measured is the way of a request in
and of its tokens out: HTTP, ingress, tokenizer, scheduler, server-sent events.  Beside it, in turns, a minimal aiohttp
server that writes events of the same size from one coroutine per client: what aiohttp itself can do here, and so the
bound.  Server and clients are one process each.

With --tokenizers, instead of that, servers with so many tokenizer processes beside one that has its tokenizer on its
own event loop, in turns as well, where the system places them (so with --no-pin).  Of the server's loop, which is one
core, it is told what a token takes of it: what is left of that is what a pool can gain where there are cores enough.

With --front, instead of that, a server whose HTTP and ingress are in a process of their own beside one that has all in
one, in turns as well and where the system places them.

    python benchmarks/bench_server.py                       # 1, 64 and 512 streams
    python benchmarks/bench_server.py --streams 512 --turns 5 --tokens 400
    python benchmarks/bench_server.py --streams 64 512 --tokenizers 1 2 --logprobs 5
    python benchmarks/bench_server.py --streams 64 512 --front
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from stream_load import completion_request, run_load

from engine.workers.frontend import FrontendCommand, RemoteIngress

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MODEL = "null"
PROMPT = list(range(10, 26))
MAX_STREAMS = 1024
LEAST_TOKENS = 20_000  # of one run
Report = Callable[[], dict[str, Any]]
Listen = Callable[[], Awaitable[int]]


# ---- the two servers, each in a process of its own ----------------------------------------------


async def serve_callboard(num_pages: int, tokenizers: int, num_logprobs: int, ingress: str) -> None:
    """The real thing but for the device."""
    from null_engine import NullSystem, Stopwatch

    from engine.config import Config, build_config
    from server.backend import Backend
    from server.commands.serve import FRONT_MODULE
    from server.http.listener import bind
    from server.model_card import ModelCard
    from server.run.app import create_runner

    config = build_config(
        Config(),
        {
            "model": {"path": str(ROOT / "examples" / "demo_model"), "name": MODEL},
            "kv": {"num_pages": num_pages},
            "scheduler": {"max_running": MAX_STREAMS, "max_step_tokens": 16384},
            "limits": {"max_requests": 2 * MAX_STREAMS},
            "placement": {"tokenizers": tokenizers, "ingress": ingress},
        },
    )
    listener = bind("127.0.0.1", 0)
    frontend = FrontendCommand(FRONT_MODULE, listener.fileno()) if ingress == "process" else None
    system = NullSystem(config, num_logprobs=num_logprobs, frontend=frontend)
    stopwatch = Stopwatch(system.actors)
    card = ModelCard(name=MODEL, max_model_len=system.max_len, vocab_size=system.spec.vocab_size, created=0)
    if isinstance(system.entrance, RemoteIngress):
        system.entrance.about = msgspec.msgpack.encode(card)
    await system.start()
    gc.collect()
    gc.freeze()  # as the command does

    async def listen() -> int:
        if frontend is None:
            runner = create_runner(config.server, config.limits, Backend(system.ingress, system.monitor, card))
            await runner.setup()
            await web.SockSite(runner, listener, backlog=MAX_STREAMS).start()
        port: int = listener.getsockname()[1]
        return port

    def report() -> dict[str, Any]:
        meter = system.monitor.meter
        assert meter is not None
        children = sum(cpu_s_of(int(pid)) for pid in Path("/proc/thread-self/children").read_text().split())
        counts = {
            "children_cpu_s": children,
            "tokens": meter.num_output_tokens,
            "steps": meter.num_steps,
            "tasks": len(asyncio.all_tasks()),
        }
        return {"actors": dict(stopwatch.seconds), **counts}

    await serve_until_told(listen, report)


def cpu_s_of(pid: int) -> float:
    """Of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def serve_echo(event: bytes) -> None:
    """A coroutine per client that writes the same event again and again."""

    async def stream(request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(fields["max_tokens"]):
            await response.write(event)
            await asyncio.sleep(0)  # the others' turn
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", stream)])
    runner = web.AppRunner(app, access_log=None)

    async def listen() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=MAX_STREAMS).start()
        port: int = runner.addresses[0][1]
        return port

    await serve_until_told(listen, lambda: {})


async def serve_until_told(listen: Listen, report: Report) -> None:
    """Listen and print the port; answer each line on standard input with what was used so far, until there is none."""
    print(await listen(), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps({"cpu_s": time.process_time(), "loop_s": time.thread_time(), **report()}), flush=True)
    os._exit(0)


class Server:
    """One of them, from outside."""

    def __init__(self, role: str, *arguments: str, core: int | None) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--role", role, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid

    def report(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        report: dict[str, Any] = json.loads(self._process.stdout.readline())
        return report

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


# ---- measuring ----------------------------------------------------------------------------------


def measure(server: Server, num_streams: int, num_tokens: int, num_logprobs: int = 0) -> dict[str, Any]:
    """One run, of several loads after each other if they are small; times per token in microseconds."""
    before = server.report()
    wishes = {"logprobs": num_logprobs} if num_logprobs else {}
    requests = [completion_request(MODEL, num_tokens, PROMPT, **wishes)] * num_streams
    loads = [run_load(server.port, requests) for _ in range(max(1, LEAST_TOKENS // (num_streams * num_tokens)))]
    after = server.report()
    total = num_streams * num_tokens * len(loads)
    num_events = sum(load.num_events for load in loads)
    row: dict[str, Any] = {
        "tokens_per_s": total / sum(load.seconds for load in loads),
        "events_per_token": num_events / total,
        "bytes_per_event": sum(load.num_bytes for load in loads) / num_events,
        "server_cpu_us": (after["cpu_s"] - before["cpu_s"]) / total * 1e6,
        "client_cpu_us": sum(load.cpu_s for load in loads) / total * 1e6,
    }
    if "actors" in after:
        assert after["tokens"] - before["tokens"] == total, "tokens were lost"
        spent = {name: after["actors"][name] - before["actors"][name] for name in after["actors"]}
        row |= {f"{name}_us": seconds / total * 1e6 for name, seconds in spent.items()}
        loop = after["loop_s"] - before["loop_s"]
        row["http_us"] = (loop - sum(spent.values())) / total * 1e6
        row["loop_us"] = loop / total * 1e6
        row["children_cpu_us"] = (after["children_cpu_s"] - before["children_cpu_s"]) / total * 1e6
        row["tokens_per_step"] = total / (after["steps"] - before["steps"])
    return row


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure."""
    return {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}


def sample_event(port: int) -> bytes:
    """What one event of ours looks like."""
    import socket

    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(completion_request(MODEL, 3, PROMPT))
        data = b""
        while chunk := client.recv(1 << 16):
            data += chunk
    start = data.index(b"data: ", data.index(b"data: ") + 1)  # the second one: no usage in it
    return data[start : data.index(b"\n\n", start) + 2]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--tokens", type=int, default=0, help="per stream; 0 for about 100,000 in all")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-pin", action="store_true", help="let the system place the processes")
    parser.add_argument("--tokenizers", type=int, nargs="+", help="compare pools of these sizes with none")
    parser.add_argument("--logprobs", type=int, default=0, help="with --tokenizers: so many with every token")
    parser.add_argument("--front", action="store_true", help="compare HTTP in a process of its own with HTTP inline")
    parser.add_argument("--ingress", default="inline", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=["callboard", "echo"], help=argparse.SUPPRESS)
    parser.add_argument("--event", help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, default=MAX_STREAMS * 64, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "callboard":
        tokenizers = arguments.tokenizers[0] if arguments.tokenizers else 0
        uvloop.run(serve_callboard(arguments.pages, tokenizers, arguments.logprobs, arguments.ingress))
    elif arguments.role == "echo":
        uvloop.run(serve_echo(bytes.fromhex(arguments.event)))
    elif arguments.tokenizers:
        compare_pools(arguments)
    elif arguments.front:
        compare_fronts(arguments)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """In turns, so that whatever else the machine does hits both."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = len(cores) > 1 and not arguments.no_pin
    ours = Server("callboard", core=cores[0] if pinned else None)
    echo = Server("echo", "--event", sample_event(ours.port).hex(), core=cores[0] if pinned else None)
    if pinned:
        os.sched_setaffinity(0, {cores[1]})
    results = []
    for num_streams in arguments.streams:
        num_tokens = arguments.tokens or max(40, min(900, 100_000 // num_streams))
        rows: list[dict[str, Any]] = []
        bounds: list[dict[str, Any]] = []
        for _ in range(arguments.turns):
            rows.append(measure(ours, num_streams, num_tokens))
            bounds.append(measure(echo, num_streams, num_tokens))
        ratios = [row["tokens_per_s"] / bound["tokens_per_s"] for row, bound in zip(rows, bounds, strict=True)]
        costs = [bound["server_cpu_us"] / row["server_cpu_us"] for row, bound in zip(rows, bounds, strict=True)]
        results.append(
            {
                "streams": num_streams,
                "tokens_per_stream": num_tokens,
                "callboard": middle(rows),
                "echo": middle(bounds),
                "ratio": round(statistics.median(ratios), 3),
                "cpu_ratio": round(statistics.median(costs), 3),
            }
        )
    ours.close()
    echo.close()
    show(results)
    keep(arguments.output, {"pinned": pinned, "results": results})


def compare_pools(arguments: argparse.Namespace) -> None:
    """Pools of several sizes and no pool, in turns."""
    sizes = [0, *arguments.tokenizers]
    wishes = ("--logprobs", str(arguments.logprobs))
    servers = {size: Server("callboard", "--tokenizers", str(size), *wishes, core=None) for size in sizes}
    results = []
    for num_streams in arguments.streams:
        num_tokens = arguments.tokens or max(40, min(900, 100_000 // num_streams))
        rows: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
        for _ in range(arguments.turns):
            for size, server in servers.items():
                rows[size].append(measure(server, num_streams, num_tokens, arguments.logprobs))
        for size in sizes:
            both = list(zip(rows[size], rows[0], strict=True))
            speeds = [row["tokens_per_s"] / none["tokens_per_s"] for row, none in both]
            loops = [none["loop_us"] / row["loop_us"] for row, none in both]
            results.append(
                {
                    "streams": num_streams,
                    "tokens_per_stream": num_tokens,
                    "tokenizers": size,
                    "logprobs": arguments.logprobs,
                    **middle(rows[size]),
                    "ratio": round(statistics.median(speeds), 3),
                    "loop_ratio": round(statistics.median(loops), 3),
                }
            )
    for server in servers.values():
        server.close()
    columns = ("streams", "tokenizers", "tokens/s", "to none", "events/token", "loop us/token", "none's to it",
               "server CPU", "tokenizers' CPU", "http", "ingress", "text", "scheduler")  # fmt: skip
    table = Table(*columns)
    for row in results:
        text = row["tokenizers_us"] if row["tokenizers"] else row["tokenizer_us"]
        figures = (row["server_cpu_us"], row["children_cpu_us"], row["http_us"], row["ingress_us"], text)
        table.add_row(
            str(row["streams"]),
            str(row["tokenizers"] or "none"),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['events_per_token']:.3f}",
            f"{row['loop_us']:.1f}",
            f"{row['loop_ratio']:.2f}",
            *(f"{figure:.1f}" for figure in (*figures, row["scheduler_us"])),
        )
    Console(width=160).print(table)
    keep(arguments.output, {"results": results})


def compare_fronts(arguments: argparse.Namespace) -> None:
    """HTTP in both places, in turns."""
    places = ("inline", "process")
    servers = {place: Server("callboard", "--ingress", place, core=None) for place in places}
    results = []
    for num_streams in arguments.streams:
        num_tokens = arguments.tokens or max(40, min(900, 100_000 // num_streams))
        rows: dict[str, list[dict[str, Any]]] = {place: [] for place in places}
        for _ in range(arguments.turns):
            for place, server in servers.items():
                row = measure(server, num_streams, num_tokens)
                row["all_cpu_us"] = row["server_cpu_us"] + row["children_cpu_us"]
                rows[place].append(row)
        for place in places:
            both = list(zip(rows[place], rows["inline"], strict=True))
            results.append(
                {
                    "streams": num_streams,
                    "tokens_per_stream": num_tokens,
                    "ingress": place,
                    **middle(rows[place]),
                    **{
                        f"{key}_ratio": round(statistics.median(row[key] / inline[key] for row, inline in both), 3)
                        for key in ("tokens_per_s", "loop_us", "all_cpu_us")
                    },
                }
            )
    for server in servers.values():
        server.close()
    table = Table("streams", "ingress", "tokens/s", "to inline", "events/token", "engine's loop us/token", "to inline",
                  "frontend's CPU", "all CPU", "to inline")  # fmt: skip
    for row in results:
        table.add_row(
            str(row["streams"]),
            row["ingress"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s_ratio']:.2f}",
            f"{row['events_per_token']:.3f}",
            f"{row['loop_us']:.1f}",
            f"{row['loop_us_ratio']:.2f}",
            f"{row['children_cpu_us']:.1f}",
            f"{row['all_cpu_us']:.1f}",
            f"{row['all_cpu_us_ratio']:.2f}",
        )
    Console(width=160).print(table)
    keep(arguments.output, {"results": results})


def show(results: list[dict[str, Any]]) -> None:
    columns = ("streams", "tokens/s", "echo/s", "ratio", "CPU ratio", "events/token", "CPU us/token", "http", "ingress",
               "tokenizer", "scheduler", "echo CPU")  # fmt: skip
    table = Table(*columns)
    for result in results:
        ours, echo = result["callboard"], result["echo"]
        keys = ("server_cpu_us", "http_us", "ingress_us", "tokenizer_us", "scheduler_us")
        figures = (*(ours[key] for key in keys), echo["server_cpu_us"])
        table.add_row(
            str(result["streams"]),
            f"{ours['tokens_per_s']:,.0f}",
            f"{echo['tokens_per_s']:,.0f}",
            f"{result['ratio']:.2f}",
            f"{result['cpu_ratio']:.2f}",
            f"{ours['events_per_token']:.3f}",
            *(f"{figure:.1f}" for figure in figures),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
