"""``callboard serve --replicas N --on ray`` as a process, and what a benchmark does to it.

Owns: the process, who of its descendants is which replica.  Does not know: what is asked of the replicas, or measured.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp

from server.local_token import read_token

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
TIMEOUT_S = 180.0
POLL_EVERY_S = 0.02
LISTENING = "0A"  # in /proc/net/tcp
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cluster:
    """A context manager: the router listens at ``url`` inside of it."""

    def __init__(self, size: int, num_pages: int) -> None:
        self.size = size
        command = [sys.executable, "-m", "server.cli", "serve", str(DEMO), "--port", "0", "--on", "ray"]
        command += ["--replicas", str(size), "--set", f"kv.num_pages={num_pages}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        self._said: list[str] = []
        found = None
        while found is None:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("the router has ended:\n" + "".join(self._said))
            self._said.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
        self.url = found[0]
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def _read(self, lines: IO[str]) -> None:
        # Else the pipe would fill up and the router wait for us.
        self._said.extend(lines)

    async def replicas(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """GET /replicas."""
        async with session.get(f"{self.url}/replicas", headers={"Authorization": f"Bearer {read_token()}"}) as response:
            found: list[dict[str, Any]] = (await response.json())["replicas"]
            return found

    async def wait_until_ready(self, session: aiohttp.ClientSession) -> list[str]:
        """Until all replicas are; their addresses."""
        return [one["url"] for one in await self.wait_until(session, lambda one: one["state"] == "ready")]

    async def wait_until(
        self, session: aiohttp.ClientSession, holds: Callable[[dict[str, Any]], bool]
    ) -> list[dict[str, Any]]:
        """Until it holds for every replica; what they are then."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            replicas = await self.replicas(session)
            if all(holds(one) for one in replicas):
                return replicas
            if time.monotonic() > deadline:
                raise TimeoutError("the replicas do not get there:\n" + "".join(self._said))
            await asyncio.sleep(POLL_EVERY_S)

    def kill(self, url: str) -> None:
        """SIGKILL for the process that listens at a replica's address."""
        inode = _listening_inode(int(url.rpartition(":")[2]))
        (pid,) = [pid for pid in self._descendants() if f"socket:[{inode}]" in _open_files(pid)]
        os.kill(pid, signal.SIGKILL)

    def router_cpu_s(self) -> float:
        """Processor time of the router's process so far, in seconds, in steps of 10 ms."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def _descendants(self) -> Iterator[int]:
        todo = [self._process.pid]
        while todo:
            pid = todo.pop()
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in map(int, children.read_text().split()):
                    todo.append(child)
                    yield child


def _listening_inode(port: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            return fields[9]
    raise RuntimeError(f"nobody listens on port {port}")


def _open_files(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(entry))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found
