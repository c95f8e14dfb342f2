"""The time between two tokens of one good client, beside many hostile ones.

A real server of the demo model, its executor in a process of its own, with keys and without.  The good client streams
one answer after the other, beside the hostile clients and alone in turns, so that both meet the same machine.  The
hostile clients send 100,000 requests of every kind that once disturbed others.  They stand for clients elsewhere: their
process runs only where no other one needs the processor.  It is stopped while the good client is alone; processes that
only count then take what it would take.  So no core is idle in either, and what is compared is the server's work.
In turns of a third kind, the control, as many hostile clients send the same to a server of another process, which only
answers 404: what the good client loses then is the work of the load and not of the server.

Compared are the good client's texts, which must not change, and the time between two of its tokens.  The script fails
where the 99th percentile is more than twice that of alone, where a text differs, where an answer is a 5xx other than
503, or where something is still held at the end.

    python benchmarks/bench_hostile.py --json benchmarks/results/hostile_2core_cpu.json
    python benchmarks/bench_hostile.py --requests 3000 --only keyed     # a smoke run
    python benchmarks/bench_hostile.py --minutes 10                     # as many as come in ten minutes
    python benchmarks/bench_hostile.py --requests 3000 --model ~/.cache/callboard/real/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import asyncio
import http.client
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from server.local_token import read_token

ROOT = Path(__file__).parents[1]
LIMIT = 2.0  # p99 beside the hostile ones, as a multiple of alone
KEYS = {name: f"sk-{name}-{'0' * 24}" for name in ("good", "first", "second", "operator")}
KEY_FILE = f"""
[clients]
good = "{KEYS["good"]}"
first = "{KEYS["first"]}"
second = "{KEYS["second"]}"
[operators]
operator = "{KEYS["operator"]}"
"""
CONFIG = """
[model]
path = "{model}"
name = "demo"
[scheduler]
max_running = 16
itl_target_ms = 1
[placement]
executor = "process"
[limits]
max_requests_per_client = 8
requests_per_minute = 6000
[storage]
folder = "{folder}/data"
{server}
"""
MODES = {"keyed": '[server]\nkey_file = "{folder}/keys.toml"', "open": ""}
ASKED = {"model": "demo", "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": True}
PROMPTS = [f"def function_{number}(a, b):\n" for number in range(8)]
AMBIGUOUS = 'root ::= root root root | root root | "a" | "aa" | "aaa"'
ODD_PATHS = ("/x/../v1/completions", "/v1/./completions", "//v1/completions", "/v1/completions%00")
AT_ONCE = 32
HOLD_S = 0.5
ALONE_S, BESIDE_S = 2.0, 12.0  # of a turn
SETTLED_LOOKS, LOOK_EVERY_S = 5, 0.1  # so often in a row nothing may run until the good client counts as alone
PATIENCE_S = 60.0
# Of a thousand requests.  The costly ones are few, and far more than one of them is under way at any time.
KINDS = {
    "first in line": 300,
    "wrong key": 150,
    "odd path": 120,
    "nonsense": 120,
    "leaves early": 120,
    "operator's route": 80,
    "in the background": 60,
    "odd upload": 28,
    "silent": 10,
    "unfinished body": 10,
    "ambiguous grammar": 1,
    "empty messages": 1,
}


def request(method: str, path: str, body: bytes = b"", key: str = "", *headers: str) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    if not any(line.startswith("Content-Type") for line in headers):
        lines.append("Content-Type: application/json")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Hostile:
    """The clients that mean harm.  source: the address that they come from; counts: answers by kind and status."""

    def __init__(self, port: int, keyed: bool, count: int, minutes: float) -> None:
        self._port, self._keyed, self._left = port, keyed, count
        self._until = time.monotonic() + minutes * 60
        self._dice = random.Random(7)
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(*(self._go_on(number) for number in range(AT_ONCE)))

    async def _go_on(self, number: int) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        key = KEYS[("first", "second")[number % 2]] if self._keyed else ""
        source = "127.0.0.1" if self._keyed else f"127.0.0.{2 + number % 2}"
        while self._left > 0 and time.monotonic() < self._until:
            self._left -= 1
            kind = self._dice.choices(kinds, weights)[0]
            try:
                answer = await asyncio.wait_for(self._one(kind, key, source), PATIENCE_S)
            except TimeoutError:
                answer = "no answer"
            except (OSError, asyncio.IncompleteReadError):
                answer = "closed"
            self.counts[f"{kind}: {answer}"] += 1

    async def _one(self, kind: str, key: str, source: str) -> str:
        """Status of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(source, 0))
        try:
            if kind == "silent":
                await asyncio.sleep(HOLD_S)
                return "left"
            data = self._bytes(kind, key)
            if kind == "unfinished body":
                writer.write(data[:-1])
                await asyncio.sleep(HOLD_S)
                return "left"
            writer.write(data)
            if kind == "leaves early":
                await asyncio.sleep(self._dice.random() * 0.02)
                return "left"
            line = (await reader.readline()).split()
            return line[1].decode() if line else "closed"
        finally:
            writer.transport.abort()

    def _bytes(self, kind: str, key: str) -> bytes:
        short: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        dice = self._dice
        match kind:
            case "first in line":
                asked = short | {"priority": -(2**31), "n": dice.choice((1, 1, 4))}
                return request("POST", "/v1/completions", json.dumps(asked).encode(), key)
            case "wrong key":
                return request("POST", "/v1/completions", json.dumps(short).encode(), f"sk-{dice.random()}")
            case "odd path":
                path = dice.choice(
                    ("/x/../v1/completions", "/v1/./completions", "//v1/completions", "/v1/completions%00")
                )
                return request("POST", path, json.dumps(short).encode(), key)
            case "nonsense":
                odd: dict[str, Any] = dice.choice(
                    ({"max_tokens": -1}, {"n": 1e9}, {"logit_bias": {"x": 1}}, {"prompt": [[]]})
                )
                return request("POST", "/v1/completions", json.dumps(short | odd).encode(), key)
            case "leaves early":
                asked = short | {
                    "max_tokens": 1000,
                    "prompt": [dice.randint(3, 250) for _ in range(300)],
                    "stream": True,
                }
                return request("POST", "/v1/completions", json.dumps(asked).encode(), key)
            case "operator's route":
                method, path = dice.choice(
                    (("GET", "/health_generate"), ("POST", "/apply"), ("POST", "/sleep"), ("GET", "/metrics"))
                )
                return request(method, path, b"", key)
            case "in the background":
                asked = {"model": "demo", "input": "x", "background": True, "max_output_tokens": 200}
                return request("POST", "/v1/responses", json.dumps(asked).encode(), key)
            case "odd upload":
                body = b'--b\r\nContent-Disposition: form-data; name="purpose\r\n\r\nbatch\r\n--b--\r\n'
                return request("POST", "/v1/files", body, key, "Content-Type: multipart/form-data; boundary=b")
            case "unfinished body":
                return request("POST", "/v1/completions", b" " * (4 << 20), key)
            case "ambiguous grammar":
                asked = {
                    "model": "demo",
                    "prompt": "x",
                    "max_tokens": 1500,
                    "structured_outputs": {"grammar": AMBIGUOUS},
                }
                return request("POST", "/v1/completions", json.dumps(asked).encode(), key)
            case "empty messages":
                messages = ",".join(['{"role":"user","content":""}'] * 110_000)
                return request(
                    "POST", "/v1/chat/completions", b'{"model":"demo","messages":[%b]}' % messages.encode(), key
                )
        raise AssertionError(kind)


def yield_always() -> None:
    """Run only where no other process needs the processor."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def be_harmless() -> None:
    """The process that counts, which takes a core that would be idle."""
    yield_always()
    for _ in itertools.count():
        pass


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read a request and answer 404."""
    with suppress(OSError, asyncio.IncompleteReadError):
        size = re.search(rb"Content-Length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(int(size[1]) if size else 0)
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
    writer.close()


async def be_another_server() -> None:
    """The process of the control, which prints its port."""
    yield_always()
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def be_hostile(port: int, keyed: bool, count: int, minutes: float) -> None:
    """The process of the hostile clients; it prints the statuses of their answers."""
    yield_always()
    hostile = Hostile(port, keyed, count, minutes)
    asyncio.run(hostile.run())
    print(json.dumps(hostile.counts))


class Good:
    """The client whose streams are measured.  gaps: seconds between two tokens; waits: until the first one."""

    def __init__(self, port: int, keyed: bool) -> None:
        self._port, self._headers = port, {"Content-Type": "application/json"}
        if keyed:
            self._headers["Authorization"] = f"Bearer {KEYS['good']}"
        self.gaps: list[float] = []
        self.waits: list[float] = []

    def stream(self, prompt: str) -> str:
        """One answer's text."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        last = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(ASKED | {"prompt": prompt}), self._headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        text, first = "", True
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                (self.waits if first else self.gaps).append(now - last)
                last, first = now, False
                text += json.loads(line[6:])["choices"][0]["text"]
        connection.close()
        return text

    def stream_for(self, seconds: float, texts: dict[str, str], crowd: subprocess.Popen[str]) -> int:
        """Stream answers for so long, or until the crowd has ended.  Returns how many of them are not as they were."""
        until, differing = time.monotonic() + seconds, 0
        for prompt, text in itertools.cycle(texts.items()):
            if time.monotonic() > until or crowd.poll() is not None:
                break
            differing += self.stream(prompt) != text
        return differing

    def figures(self) -> dict[str, float]:
        return {
            "streams": len(self.waits),
            "itl_p50_ms": round(statistics.median(self.gaps) * 1e3, 2),
            "itl_p99_ms": round(statistics.quantiles(self.gaps, n=100)[98] * 1e3, 2),
            "itl_most_ms": round(max(self.gaps) * 1e3, 1),
            "ttft_p50_ms": round(statistics.median(self.waits) * 1e3, 1),
            "ttft_most_ms": round(max(self.waits) * 1e3, 1),
        }


class Cores:
    """The time that a server's threads have had a core, and waited for one, in seconds; its executor's too."""

    def __init__(self, pid: int) -> None:
        task = Path(f"/proc/{pid}/task")
        self._tasks = [task, *(Path(f"/proc/{one}/task") for one in (task / str(pid) / "children").read_text().split())]
        self.ran_s = self.waited_s = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Add the time inside of the context."""
        before = self._sums()
        yield
        after = self._sums()
        self.ran_s += after[0] - before[0]
        self.waited_s += after[1] - before[1]

    def _sums(self) -> tuple[float, float]:
        times = [path.read_text().split() for task in self._tasks for path in task.glob("*/schedstat")]
        return sum(int(ran) for ran, *_ in times) / 1e9, sum(int(waited) for _, waited, _ in times) / 1e9

    def figures(self) -> dict[str, float]:
        return {"server_ran_s": round(self.ran_s, 1), "server_waited_for_a_core_s": round(self.waited_s, 1)}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start this script as another process, which is not waited for."""
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)


def start_control(ends: ExitStack, mode: str) -> list[subprocess.Popen[str]]:
    """Start another server and hostile clients of it, which end with ``ends``."""
    processes = [start("--control")]
    assert processes[0].stdout is not None
    port = processes[0].stdout.readline().strip()
    processes.append(start("--crowd", port, "--only", mode, "--requests", str(10**9)))
    for one in processes:
        ends.callback(one.kill)
    return processes


def measure(mode: str, num_requests: int, minutes: float, model: Path) -> dict[str, Any]:
    """One server; the good client alone, beside the control, and beside the hostile ones, in turns."""
    keyed = mode == "keyed"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        server, port = serve(Path(folder), mode, model)
        ends.callback(server.wait, 60)
        ends.callback(server.terminate)
        Good(port, keyed).stream(PROMPTS[0])
        alone = Good(port, keyed)
        texts = {prompt: alone.stream(prompt) for prompt in PROMPTS}
        counting = [start("--harmless") for _ in range(os.cpu_count() or 1)]
        control = start_control(ends, mode)
        for one in counting:
            ends.callback(one.kill)
        for one in counting + control:
            one.send_signal(signal.SIGSTOP)
        count = ("--requests", str(num_requests), "--minutes", str(minutes))
        crowd = start("--crowd", str(port), "--only", mode, *count)
        ends.callback(crowd.kill)
        beside, controlled = Good(port, keyed), Good(port, keyed)
        differing, started = 0, time.monotonic()
        cores = Cores(server.pid), Cores(server.pid)
        while crowd.poll() is None:
            with cores[1].noted():
                differing += beside.stream_for(BESIDE_S, texts, crowd)
            crowd.send_signal(signal.SIGSTOP)
            settle(port, keyed)
            with cores[0].noted(), continued(counting):
                differing += alone.stream_for(ALONE_S, texts, crowd)
            with continued(control):
                differing += controlled.stream_for(ALONE_S, texts, crowd)
            crowd.send_signal(signal.SIGCONT)
        took_s, counts = time.monotonic() - started, json.loads(crowd.communicate()[0])
        return {
            "mode": mode,
            "hostile_requests": sum(counts.values()),
            "seconds": round(took_s, 1),
            "load": [round(one, 1) for one in os.getloadavg()],
            "alone": alone.figures() | cores[0].figures(),
            "control": controlled.figures(),
            "beside": beside.figures() | cores[1].figures(),
            "texts_that_differ": differing,
            "answers": dict(sorted(counts.items())),
            "held_at_the_end": held(port),
        }


def serve(folder: Path, mode: str, model: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a server; returns it with its port."""
    (folder / "keys.toml").write_text(KEY_FILE)
    sections = MODES[mode].format(folder=folder)
    config = folder / "config.toml"
    config.write_text(CONFIG.format(model=model.resolve(), folder=folder, server=sections))
    command = [sys.executable, "-m", "callboard", "serve", str(config), "--port", "0", "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while (found := re.search(r"http://127\.0\.0\.1:(\d+)", line := server.stdout.readline())) is None:
        assert line or server.poll() is None, "the server did not start"
    return server, int(found[1])


@contextmanager
def continued(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Let stopped processes run inside of the context."""
    for one in processes:
        one.send_signal(signal.SIGCONT)
    yield
    for one in processes:
        one.send_signal(signal.SIGSTOP)


def settle(port: int, keyed: bool) -> None:
    """Wait until all that the hostile clients have begun is over, in the background too."""
    headers = {"Authorization": f"Bearer {KEYS['operator'] if keyed else read_token()}"}
    until, idle = time.monotonic() + PATIENCE_S, 0
    while idle < SETTLED_LOOKS and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/stats", headers=headers)
        idle = 0 if json.load(connection.getresponse())["requests"]["open"] else idle + 1
        connection.close()


def held(port: int) -> bool:
    """Whether the server is not ready, a while after all is over."""
    time.sleep(2.0)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/ready")
    return connection.getresponse().status != 200


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="of the hostile clients, in each mode")
    parser.add_argument("--only", choices=MODES, help="one mode instead of both")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "examples/demo_model", help="a checkpoint in place of the demo model"
    )
    parser.add_argument("--crowd", type=int, metavar="PORT", help="be the hostile clients of the server there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the hostile clients at most, in each mode")
    parser.add_argument("--harmless", action="store_true", help="be a process that counts")
    parser.add_argument("--control", action="store_true", help="be the server of the control")
    arguments = parser.parse_args()
    if arguments.harmless:
        return be_harmless()
    if arguments.control:
        return asyncio.run(be_another_server())
    if arguments.crowd:
        return be_hostile(arguments.crowd, arguments.only == "keyed", arguments.requests, arguments.minutes)
    table = Table("mode", "clients", "p50, ms", "p99, ms", "most, ms", "first token p50, ms", "most, ms")
    results, wrong = [], []
    for mode in [arguments.only] if arguments.only else MODES:
        results.append(found := measure(mode, arguments.requests, arguments.minutes, arguments.model))
        for clients in ("alone", "control", "beside"):
            table.add_row(
                mode, clients, *(f"{figure:g}" for name, figure in found[clients].items() if name.endswith("_ms"))
            )
        found["ratio"] = round(found["beside"]["itl_p99_ms"] / found["alone"]["itl_p99_ms"], 3)
        found["ratio_of_the_control"] = round(found["control"]["itl_p99_ms"] / found["alone"]["itl_p99_ms"], 3)
        failures = [name for name in found["answers"] if re.search(r": 5(?!03)", name)]
        if found["ratio"] > LIMIT or found["texts_that_differ"] or failures or found["held_at_the_end"]:
            wrong.append(f"{mode}: ratio {found['ratio']}, {found['texts_that_differ']} texts differ, {failures}")
    Console(width=140).print(table)
    for found in results:
        count, seconds = found["hostile_requests"], found["seconds"]
        print(f"{found['mode']}: {found['ratio']} times, {count} in {seconds} s, load {found['load']}")
        print(f"  the control: {found['ratio_of_the_control']} times")
        print(*(f"  {name}: {count}" for name, count in found["answers"].items()), sep="\n")
    keep(arguments.output, {"runs": results})
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
