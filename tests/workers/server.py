"""``callboard serve`` with an executor process, in a process group of its own, and clients for it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.pace import far
from tests.server.http_client import as_operator
from tests.workers.executors import within

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.toml"
MODEL = "callboard-demo"
REAL = ("-m", "server.cli")
# A server whose executors need no torch, for what does not depend on the model.
QUICK = ("-m", "tests.workers.quick_server")


class Server:
    """A context manager; ``process`` is the server itself, or what launches it: the leader of its group."""

    def __init__(
        self,
        *overrides: str,
        wait: bool = True,
        launcher: Sequence[str] = REAL,
        arguments: Sequence[str] = (),
        **options: Any,
    ) -> None:
        command = [sys.executable, *launcher, "serve", str(DEMO), "--port", "0", *arguments]
        for override in ("kv.num_pages=512", "placement.executor=process", *overrides):
            command += ["--set", override]
        # A file, since a pipe that nobody reads would stop the server once it is full.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.sockets = Path(tempfile.mkdtemp())
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.sockets), **options.pop("env", {})}
        options = {"env": environment, "stdout": subprocess.PIPE, "stderr": self._log, "text": True, **options}
        self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
        self.url = self._read_url() if wait else ""

    def _read_url(self) -> str:
        assert self.process.stdout is not None
        lines: list[str] = []
        while "curl" not in (line := self.process.stdout.readline()):
            lines.append(line)
            assert line or self.process.poll() is None, self.logged()
        self.greeting = "".join([*lines, line])
        found = re.search(r"http://127\.0\.0\.1:\d+", self.greeting)
        assert found, lines
        return found[0]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._log.close()
        within(2, lambda: not self.group())  # its children are told by the kernel, and leave nothing behind
        self.sockets.rmdir()  # fails if it left a socket behind

    def logged(self) -> str:
        """Standard error so far."""
        self._log.seek(0)
        return self._log.read()

    def group(self) -> list[int]:
        """Who of its process group is alive."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if state != "Z" and int(group) == self.process.pid:
                    found.append(int(entry.name))
        return found

    def get(self, path: str) -> tuple[int, dict]:
        """Status and body."""
        try:
            request = urllib.request.Request(self.url + path, headers=as_operator())
            with urllib.request.urlopen(request, timeout=far(5)) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def ready(self) -> bool:
        """Whether it says so; a server that cannot answer is not."""
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def end(self, number: signal.Signals | None = None, timeout_s: float = 20) -> tuple[int, str]:
        """Signal it, if a signal is given; exit code and standard error once it has ended."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait(far(timeout_s))
        return self.process.returncode, self.logged()


def request(index: int, max_tokens: int) -> dict:
    """A request like no other; every other one is greedy."""
    return {
        "model": MODEL,
        "prompt": f"def function_{index}(value):\n    ",
        "max_tokens": max_tokens,
        "temperature": 0.0 if index % 2 else 0.8,
        "seed": 100 + index,
        # With few candidates a draw hardly ever falls so close to the border of two that other float rounding, as a
        # prompt computed in other chunks has it, decides.
        "top_k": 4,
        "ignore_eos": True,
        "stream": True,
    }


class Client:
    """Many streams at once.  ``texts``, ``reasons`` and ``errors`` grow while they run."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.texts = [""] * count
        self.reasons: list[str | None] = [None] * count
        self.errors: list[dict | None] = [None] * count
        self.done = 0
        self._url = url
        self._requests = [request(index, max_tokens) for index in range(count)]

    async def run(self, *, may_break: bool = False) -> list[BaseException | None]:
        """Returns how each connection broke, if that may happen."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = (self._one(session, index) for index in range(len(self._requests)))
            return await asyncio.gather(*streams, return_exceptions=may_break)

    async def _one(self, session: aiohttp.ClientSession, index: int) -> None:
        async with session.post(f"{self._url}/v1/completions", json=self._requests[index]) as response:
            if response.status != 200:
                self.errors[index] = await response.json()
                return
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    self.done += 1
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.errors[index] = event
                    continue
                for choice in event["choices"]:
                    self.texts[index] += choice["text"]
                    self.reasons[index] = choice["finish_reason"] or self.reasons[index]

    @property
    def begun(self) -> bool:
        """Whether every stream has begun; then most still run, unless this machine is very busy."""
        return all(self.texts)


def stream_all(server: Server, count: int, during: Callable[[], None] | None = None, max_tokens: int = 250) -> Client:
    """Run streams to their end; ``during`` is called on a thread once all of them have begun."""
    client = Client(server.url, count, max_tokens)

    async def main() -> None:
        running = asyncio.ensure_future(client.run())
        if during is not None:
            async with asyncio.timeout(far(30)):
                while not client.begun:
                    assert not any(client.errors), client.errors
                    await asyncio.sleep(0.002)
            await asyncio.to_thread(during)
        await asyncio.wait_for(running, far(60))

    asyncio.run(main())
    return client


def run_cli(*arguments: str, timeout_s: float = 30, **options: Any) -> subprocess.CompletedProcess[str]:
    """A ``callboard`` command that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=far(timeout_s),
        check=False,
        **options,
    )


def shared_memory(pids: Sequence[int]) -> set[str]:
    """Files in /dev/shm that processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return set(re.findall(r"/dev/shm/\S+", maps))
