"""Everything is killed under many streams, and their clients rejoin: does each get every event exactly once?

    python benchmarks/bench_killed.py --json benchmarks/results/killed_2core_cpu.json

The demo model, ``callboard serve`` with a journal, in one process or (--processes) in four.  The process group gets
SIGKILL at a random moment of 32 streams, and is started again; each client goes on with GET /v1/streams/{id} or by the
same POST, both with ``Last-Event-ID``.  The streams are of four endpoints, greedy and sampled, with several choices,
log probabilities, calls and stop strings.  Every one must have the undisturbed one's events, but for ids and times,
numbered without a gap; one that has not makes this script fail.
"""

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from machine import keep, new_parser
from rich.console import Console
from tqdm import tqdm

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
READY_WITHIN_S = 180.0
POLL_EVERY_S = 0.05
TOLERANCE = 1e-3
# What differs from run to run: names, times, and what was in the cache.
VOLATILE = frozenset({
    "id", "item_id", "call_id", "created", "created_at", "usage", "system_fingerprint", "prompt_tokens_details",
})  # fmt: skip
PROCESSES = ("placement.executor=process", "placement.ingress=process", "placement.tokenizers=1")
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def requests(number: int, num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each stream."""
    kinds: list[tuple[str, dict[str, Any]]] = []
    for index in range(number):
        prompt = f"def function_{index}(value):\n    "
        drawn = {"temperature": 0.8, "top_k": 4, "seed": 100 + index} if index % 2 else {"temperature": 0}
        fields = {"model": "callboard-demo", "stream": True, **drawn}
        long = {"ignore_eos": True, "max_tokens": num_tokens}
        asked = [{"role": "user", "content": f"What is a page? {index}"}]
        match index % 8:
            case 0 | 1:
                given = {"prompt": prompt, "return_token_ids": True, "stream_options": {"include_usage": True}, **long}
                kinds.append(("/v1/completions", fields | given))
            case 2:
                kinds.append(("/v1/completions", fields | {"prompt": prompt, "logprobs": 2, "echo": True, **long}))
            case 3:
                kinds.append(("/v1/completions", fields | {"prompt": prompt, "n": 3, **long}))
            case 4:
                given = {"messages": asked, "logprobs": True, "top_logprobs": 1, "stop": ["\n\n\n\n"], **long}
                kinds.append(("/v1/chat/completions", fields | given))
            case 5:
                sums = [{"role": "user", "content": f"What is {index} plus 4?"}]
                given = {"messages": sums, "tools": [CALCULATOR], "max_tokens": num_tokens}
                kinds.append(("/v1/chat/completions", fields | given))
            case 6:
                kinds.append(("/v1/responses", fields | {"input": f"What is a row? {index}", "store": False, **long}))
            case 7:
                del fields["seed"]
                given = {"messages": asked, "max_tokens": num_tokens, "temperature": 0}
                kinds.append(("/v1/messages", fields | given))
    return kinds


class Server:
    """``callboard serve`` as a group of processes, on the same port each time."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        self._command = [sys.executable, "-m", "server.cli", "serve", str(DEMO)]
        given = (
            "storage.journal_streams=true", f"storage.folder={folder}", "kv.num_pages=2048", "device.kind=cpu", *options
        )  # fmt: skip
        for option in given:
            self._command += ["--set", option]
        self._log = folder / "server.log"
        self._port = 0
        self.url = ""
        self.start()

    def start(self) -> None:
        """Returns when it listens, which is before the model is loaded."""
        with self._log.open("ab") as said:
            begins = said.tell()
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self._port)],
                stdout=said,
                stderr=said,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        if not self._port:
            deadline = time.monotonic() + READY_WITHIN_S
            while (found := re.search(rb"http://127\.0\.0\.1:(\d+)", self._log.read_bytes()[begins:])) is None:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server has not started: {self._log.read_text()}")
                time.sleep(POLL_EVERY_S)
            self._port = int(found[1])
            self.url = f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """All of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def wait_until_ready(self, session: aiohttp.ClientSession) -> None:
        """Until it takes requests."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_EVERY_S)
        raise TimeoutError(self._log.read_text())


class Client:
    """One stream, read to its end through whatever happens.  events: what each said, without what differs by nature.

    gap_s: the longest time without an event.  num_rejoined: how often it went on."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str, path: str, body: dict[str, Any]) -> None:
        self.events: list[Any] = []
        self.gap_s = 0.0
        self.num_rejoined = 0
        self.faults: list[str] = []
        self._session = session
        self._url = url
        self._name = name
        self._path = path
        self._body = body

    async def read(self) -> None:
        """Until the stream has said that it has ended."""
        while True:
            try:
                async with await self._ask() as response:
                    if response.status == 503 or (response.status == 404 and not self.events):
                        self._is_known = response.status == 503 and self._is_known
                    elif response.status != 200:
                        self.faults.append(f"{response.status}: {await response.text()}")
                        return
                    elif await self._take(response.content):
                        return
            except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError):
                pass
            await asyncio.sleep(POLL_EVERY_S)

    _is_known = False  # the server may have it

    def told(self) -> list[Any]:
        """The events; of several choices what each says in all, since they come in any order."""
        if self._body.get("n", 1) == 1:
            return self.events
        texts, ends = [""] * self._body["n"], [None] * self._body["n"]
        for choice in (choice for event in self.events for choice in event["choices"]):
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] = ends[choice["index"]] or choice["finish_reason"]
        return [*texts, *ends]

    async def _ask(self) -> aiohttp.ClientResponse:
        headers = {"X-Request-Id": self._name}
        if self.events:
            self.num_rejoined += 1
            headers["Last-Event-ID"] = f"{self._name}:{len(self.events)}"
        if self._is_known and (not self.events or self.num_rejoined % 2):
            return await self._session.get(f"{self._url}/v1/streams/{self._name}", headers=headers)
        self._is_known = True
        return await self._session.post(self._url + self._path, json=self._body, headers=headers)

    async def _take(self, content: aiohttp.StreamReader) -> bool:
        last, number = time.perf_counter(), ""
        async for line in content:
            field, _, value = line.decode().strip().partition(": ")
            if field == "id":
                number = value
            if field != "data":
                continue
            if value == "[DONE]":
                return True
            if number != f"{self._name}:{len(self.events) + 1}":
                self.faults.append(f"after event {len(self.events)} comes {number}")
            said = json.loads(value)
            self.events.append(_lasting(said))
            now = time.perf_counter()
            if len(self.events) > 1:
                self.gap_s = max(self.gap_s, now - last)
            last = now
            if said.get("type") in ("response.completed", "response.incomplete", "message_stop"):
                return True
        return False


def same(one: Any, other: Any) -> bool:
    """Whether both are the same, but for the rounding of log probabilities, which other rows of a batch decide."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < TOLERANCE
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _lasting(said: Any) -> Any:
    if isinstance(said, dict):
        return {name: _lasting(value) for name, value in said.items() if name not in VOLATILE}
    return [_lasting(one) for one in said] if isinstance(said, list) else said


async def run(rounds: int, number: int, num_tokens: int, seed: int, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """All rounds on one folder."""
    rng = random.Random(seed)
    kinds = requests(number, num_tokens)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
                return await _measure(server, session, kinds, rounds, rng)
        finally:
            server.kill()


async def _measure(
    server: Server,
    session: aiohttp.ClientSession,
    kinds: list[tuple[str, dict[str, Any]]],
    rounds: int,
    rng: random.Random,
) -> dict[str, Any]:
    await server.wait_until_ready(session)
    undisturbed = [Client(session, server.url, f"u{index}", *kind) for index, kind in enumerate(kinds)]
    started = time.perf_counter()
    await asyncio.gather(*(client.read() for client in undisturbed))
    undisturbed_s = time.perf_counter() - started
    num_events = sum(len(client.events) for client in undisturbed)
    wrong = [f"undisturbed {fault}" for client in undisturbed for fault in client.faults]
    ready_again_s: list[float] = []
    num_cut = 0
    for round_number in tqdm(range(rounds), disable=not sys.stderr.isatty()):
        moment = 0.9 * rng.random() * num_events
        clients = [Client(session, server.url, f"r{round_number}-{index}", *kind) for index, kind in enumerate(kinds)]
        reading = [asyncio.create_task(client.read()) for client in clients]
        while sum(len(client.events) for client in clients) < moment:  # noqa: ASYNC110 - the clients only count
            await asyncio.sleep(0.002)
        num_cut += sum(not task.done() for task in reading)
        server.kill()
        killed = time.perf_counter()
        server.start()
        await server.wait_until_ready(session)
        ready_again_s.append(time.perf_counter() - killed)
        await asyncio.gather(*reading)
        for index, (client, other) in enumerate(zip(clients, undisturbed, strict=True)):
            wrong += [f"round {round_number}, stream {index}: {fault}" for fault in client.faults]
            if not same(client.told(), other.told()):
                wrong.append(
                    f"round {round_number}, stream {index} differs: {_difference(client.told(), other.told())}"
                )
    return {
        "streams": len(kinds),
        "events": num_events,
        "undisturbed_s": undisturbed_s,
        "kills": rounds,
        "streams_cut": num_cut,
        "ready_again_s": {"median": statistics.median(ready_again_s), "max": max(ready_again_s)},
        "wrong": wrong,
    }


def _difference(events: list[Any], others: list[Any]) -> str:
    for number, (one, other) in enumerate(zip(events, others, strict=False)):
        if not same(one, other):
            return f"event {number + 1} is {json.dumps(one)[:300]}, not {json.dumps(other)[:300]}"
    return f"{len(events)} events, not {len(others)}"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="kills")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="most of each choice")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument(
        "--processes", action="store_true", help="executor, tokenizer and HTTP in processes of their own"
    )
    given = parser.parse_args()
    options = PROCESSES if given.processes else ()
    report = asyncio.run(run(given.rounds, given.streams, given.tokens, given.seed, options))
    Console().print({name: value for name, value in report.items() if name != "wrong"})
    for line in report["wrong"]:
        print(line)
    keep(given.output, report)
    if report["wrong"]:
        sys.exit("a stream differs from the undisturbed one")


if __name__ == "__main__":
    main()
