"""Every kind of abuse at once, round after round, on `callboard serve`: does anything of it stay?

    python -m tests.server.soak --minutes 30

A round is some seconds in which clients stream, leave, stop reading, send slowly, reset, crowd in and ask for
nonsense, each kind in a thread of its own.  Then all of them stop, and once nothing is open the server's memory, files
and tasks are read: with nobody there, they must be what they were.  The command prints them and ends with 1 if they are
not (5 % of memory in the second half are allowed), or if a healthy stream was not what it was before.

Owns: rounds and readings.  Does not know: the clients, which are in ``misuse.py``.
"""

import argparse
import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.pace import far
from tests.server.http_client import as_operator
from tests.server.misuse import KINDS, MODEL, Misuse
from tests.workers.server import Server

SETTINGS = (
    f"model.name={MODEL}", "placement.executor=inline", "scheduler.max_running=16", "limits.max_requests=32",
    "server.client_timeout_s=1",
)  # fmt: skip
# What oneDNN keeps for each of a thousand shapes, and malloc for each thread, comes to a hundred megabytes in the end,
# and would hide what this looks for.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_ARENA_MAX": "1"}
MOST_GROWTH = 1.05  # of memory, in the second half
QUIET_S = 30.0  # by then everything has ended


@dataclass(frozen=True)
class Reading:
    """Of a server that nobody uses.  memory: bytes that no file stands behind.  seconds, requests: since the start."""

    seconds: float
    requests: int
    memory: int
    files: int
    tasks: int


@dataclass
class Soak:
    """What has come of it."""

    rounds: int = 0
    readings: list[Reading] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def settled(self) -> list[Reading]:
        """Without those in which pools and caches still fill: the first half."""
        return self.readings[len(self.readings) // 2 :]

    def spread(self, name: str) -> int:
        """Most less least of files or tasks."""
        values = [getattr(reading, name) for reading in self.settled]
        return max(values) - min(values)

    def growth(self) -> float:
        """Memory at the end, of what it was when all had settled."""
        return self.settled[-1].memory / self.settled[0].memory

    def bytes_per_request(self) -> float:
        """The slope of a line through the memory of all settled readings."""
        xs, ys = [one.requests for one in self.settled], [one.memory for one in self.settled]
        x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
        above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        return above / max(1.0, sum((x - x_mean) ** 2 for x in xs))


def run(num_rounds: int, round_s: float, told: Callable[[Reading], None] = lambda _: None) -> Soak:
    """So many rounds of so long."""
    soak = Soak()
    with Server(*SETTINGS, env=ENVIRONMENT) as server:
        port = int(server.url.rpartition(":")[2])
        misuse = Misuse(port)
        started = time.monotonic()
        for _ in range(num_rounds):
            until = time.monotonic() + round_s
            threads = [threading.Thread(target=misuse.go_on, args=(kind, until), name=kind) for kind in KINDS]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            files, tasks = wait_until_quiet(server, port)
            soak.rounds += 1
            soak.counts, soak.faults = dict(misuse.counts), list(misuse.faults)
            reading = Reading(
                seconds=time.monotonic() - started,
                requests=sum(soak.counts.values()),
                memory=memory(server.process.pid),
                files=files,
                tasks=tasks,
            )
            soak.readings.append(reading)
            told(reading)
    return soak


def wait_until_quiet(server: Server, port: int) -> tuple[int, int]:
    """(files, tasks) as soon as no connection but ours is open and nothing is held."""
    latest = time.monotonic() + far(QUIET_S)
    while True:
        metrics = read_metrics(port)
        held = ("num_requests_open", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if metrics["http_connections"] == 1 and not any(metrics[name] for name in held):
            return num_files(server.process.pid), int(metrics["tasks"])
        assert time.monotonic() < latest, metrics
        time.sleep(0.05)


def num_files(pid: int) -> int:
    """Open in a process whose last connection, our own, may still be closing."""
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.02)
    return min(counts)


def read_metrics(port: int) -> dict[str, float]:
    """Those without labels."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=as_operator())
    with urllib.request.urlopen(request, timeout=far(30)) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.removeprefix("callboard_").rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs}


def memory(pid: int) -> int:
    """Bytes of a process that no file stands behind, swapped out or not."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--round", type=float, default=8.0, help="seconds of a round")
    parser.add_argument("--output", type=Path, help="default: none is written")
    arguments = parser.parse_args()
    console = Console()

    def tell(reading: Reading) -> None:
        console.print(
            f"{reading.seconds:7.0f} s {reading.requests:9,} requests {reading.memory / 1e6:8.1f} MB "
            f"{reading.files:4d} files {reading.tasks:4d} tasks"
        )

    soak = run(max(3, round(60 * arguments.minutes / (arguments.round + 1))), arguments.round, tell)
    table = Table("kind", "times")
    for kind, count in soak.counts.items():
        table.add_row(kind, f"{count:,}")
    console.print(table)
    result = {"growth": round(soak.growth(), 4), "bytes_per_request": round(soak.bytes_per_request(), 2)}
    result |= {f"{name}_spread": soak.spread(name) for name in ("files", "tasks")}
    console.print(result, *soak.faults[:10])
    if arguments.output is not None:
        entry: dict[str, Any] = {**result, "faults": soak.faults, "counts": soak.counts}
        entry["readings"] = [asdict(reading) for reading in soak.readings]
        arguments.output.write_text(json.dumps(entry, indent=1) + "\n")
    return int(bool(soak.faults) or soak.spread("files") > 0 or soak.spread("tasks") > 0 or soak.growth() > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
