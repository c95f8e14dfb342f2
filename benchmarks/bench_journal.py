"""What the journal costs: tokens per second of a server with and without it, and its files beside SQLite.

    python benchmarks/bench_journal.py --json benchmarks/results/journal_2core_cpu.json

Two servers of the demo model, one with ``storage.journal_streams``, get the same 64 streams in turns; what is told is
the ratio of each pair of turns, in tokens per second and in the processor time that a token takes of the server.  The
records of 64 streams are also written, a turn of the event loop at a time, by the journal and by SQLite (a write-ahead
log, one transaction a turn), once without waiting for the disk and once with.
"""

import asyncio
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import keep, new_parser
from rich.console import Console
from stream_load import completion_request, run_load
from tqdm import tqdm

from engine.messages import Delta
from server.extensions.journal.journal import Journal
from server.extensions.journal.records import Delivered, encode

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
MODEL = "callboard-demo"
NUM_STREAMS = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Server:
    """``callboard serve`` of the demo model.  options: what is set besides."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "server.cli", "serve", str(DEMO), "--port", "0"]
        for option in ("kv.num_pages=4096", "device.kind=cpu", *options):
            command += ["--set", option]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        found = None
        while found is None:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("the server has ended")
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        self.port = int(found[1])

    def cpu_s(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(server: Server, num_tokens: int) -> tuple[float, float]:
    """(tokens per second, processor seconds per token) of one turn."""
    requests = [
        completion_request(MODEL, num_tokens, f"def function_{index}(value):\n    ") for index in range(NUM_STREAMS)
    ]
    before = server.cpu_s()
    load = run_load(server.port, requests)
    total = NUM_STREAMS * num_tokens
    return total / load.seconds, (server.cpu_s() - before) / total


def of_server(turns: int, num_tokens: int, fsync: str) -> dict[str, Any]:
    """Both servers in turns."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Server()
        kept = Server("storage.journal_streams=true", f"storage.folder={folder}", f"storage.fsync={fsync}")
        try:
            for server in (plain, kept):
                measure(server, num_tokens)
            pairs = []
            for turn in tqdm(range(turns), disable=not sys.stderr.isatty()):
                both = {
                    server: measure(server, num_tokens) for server in ((plain, kept) if turn % 2 else (kept, plain))
                }
                pairs.append((both[plain], both[kept]))
        finally:
            plain.close()
            kept.close()
    speeds = [with_it[0] / without[0] for without, with_it in pairs]
    costs = [with_it[1] / without[1] for without, with_it in pairs]
    return {
        "fsync": fsync,
        "tokens_per_s_without": statistics.median(without[0] for without, _ in pairs),
        "tokens_per_s_ratio": {"median": statistics.median(speeds), "all": sorted(speeds)},
        "cpu_us_per_token_without": statistics.median(without[1] for without, _ in pairs) * 1e6,
        "cpu_ratio": {"median": statistics.median(costs), "all": sorted(costs)},
    }


def records(turn: int) -> list[Delivered]:
    """What 64 streams have in one turn."""
    return [
        Delivered(
            number, turn + 1, 0, Delta(request_id=number, text=" value", token_ids=(turn % 997).to_bytes(4, "little"))
        )
        for number in range(1, NUM_STREAMS + 1)
    ]


def by_journal(folder: Path, turns: int, fsync: str) -> int:
    """Write by the journal; returns the bytes on disk."""

    async def write() -> int:
        journal = Journal(folder, fsync=fsync, most_bytes=1 << 32)  # type: ignore[arg-type]
        entries = [journal.begin() for _ in range(NUM_STREAMS)]
        told = asyncio.Event()
        for turn in range(turns):
            told.clear()
            for entry, record in zip(entries, records(turn), strict=True):
                journal.append(entry, record, told.set)
            await told.wait()
        num_bytes = journal.num_bytes
        journal.close()
        return num_bytes

    return asyncio.run(write())


def by_sqlite(folder: Path, turns: int, fsync: str) -> int:
    """Write by SQLite; returns the bytes on disk."""
    folder.mkdir()
    with sqlite3.connect(folder / "journal.sqlite", isolation_level=None) as base:
        base.execute("PRAGMA journal_mode=WAL")
        base.execute(f"PRAGMA synchronous={'FULL' if fsync == 'always' else 'OFF'}")
        base.execute(
            "CREATE TABLE delivered (number INTEGER, at INTEGER, record BLOB, PRIMARY KEY (number, at)) WITHOUT ROWID"
        )
        for turn in range(turns):
            base.execute("BEGIN")
            rows = [(record.number, record.at, encode(record)) for record in records(turn)]
            base.executemany("INSERT INTO delivered VALUES (?, ?, ?)", rows)
            base.execute("COMMIT")
    return sum(path.stat().st_size for path in folder.iterdir())


def of_files(turns: int, rounds: int, fsync: str) -> dict[str, Any]:
    """The journal and SQLite in turns.  Times in microseconds a record, the median of the rounds."""
    ways: dict[str, Callable[[Path, int, str], int]] = {"journal": by_journal, "sqlite": by_sqlite}
    walls: dict[str, list[float]] = {way: [] for way in ways}
    cpus: dict[str, list[float]] = {way: [] for way in ways}
    sizes: dict[str, float] = {}
    total = turns * NUM_STREAMS
    for _ in range(rounds):
        for way, write in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                wall, cpu = time.perf_counter(), time.process_time()
                sizes[way] = write(Path(folder) / way, turns, fsync) / total
                walls[way].append((time.perf_counter() - wall) / total * 1e6)
                cpus[way].append((time.process_time() - cpu) / total * 1e6)
    return {
        "fsync": fsync,
        "wall_us": {way: statistics.median(values) for way, values in walls.items()},
        "cpu_us": {way: statistics.median(values) for way, values in cpus.items()},
        "bytes": sizes,
        "sqlite_over_journal_cpu": statistics.median(
            other / own for own, other in zip(cpus["journal"], cpus["sqlite"], strict=True)
        ),
        "sqlite_over_journal_wall": statistics.median(
            other / own for own, other in zip(walls["journal"], walls["sqlite"], strict=True)
        ),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="pairs of loads")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--fsync", default="interval", help="of the server with a journal")
    parser.add_argument("--rounds", type=int, default=5, help="of writing files")
    given = parser.parse_args()
    report = {
        "streams": NUM_STREAMS,
        "files": [of_files(500, given.rounds, "never"), of_files(50, given.rounds, "always")],
        "server": of_server(given.turns, given.tokens, given.fsync),
    }
    Console().print(report)
    keep(given.output, report)


if __name__ == "__main__":
    main()
