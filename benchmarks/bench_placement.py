"""What does it cost to have the executor in a process of its own, and does overlap hide it?

Two measurements, each with both placements in turns in one run.

The link alone, around a device that does nothing but take time: none at all, or two milliseconds as a GPU might, with
one step in flight and with two.  The difference of the medians is what a process adds to a step.

The demo model: greedy streams through the whole engine.  Tokens per second, and the time between two tokens of a stream
with one step in flight and with two.

    python benchmarks/bench_placement.py --json benchmarks/results/placement_2core_cpu.json
"""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import uvloop
from echo_executor import EchoRunner
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.config import Config, build_config
from engine.control.system import System
from engine.messages import Finish, Step, StepDone, Stop
from engine.types.notices import ExecutorsLost, ExecutorsReady
from engine.types.params import SamplingParams
from engine.workers.executors import ExecutorPlacement, Executors
from engine.workers.inline import InlineExecutors
from engine.workers.limits import RestartIntensity
from engine.workers.placement import ProcessExecutors

PLACEMENTS = ("inline", "process")
WARM_UP = 200
ROWS = 64
DEVICE_MS = 2.0


class Stepper:
    """Stands where the scheduler does, with ``depth`` steps in flight.  ``times``: from one result to the next."""

    def __init__(self, depth: int, count: int) -> None:
        self.times: list[float] = []
        self.done = asyncio.Event()
        self._depth = depth
        self._count = count + WARM_UP
        self._num_sent = 0
        self._last_at = 0.0
        self._rows = bytes(4 * ROWS)

    def connect(self, group: Executors) -> None:
        """Where steps go."""
        self._link = group.links[0]
        group.connect(self)

    def put(self, message: ExecutorsReady | StepDone | ExecutorsLost) -> None:
        """A step is back, or the executor is ready."""
        now = time.perf_counter()
        self.times.append(now - self._last_at)
        self._last_at = now
        if len(self.times) == self._count:
            self.done.set()
        # From the loop, as the scheduler does it, which empties its mailbox first.
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        while self._num_sent < len(self.times) - 1 + self._depth:
            self._link.put(Step(step_id=self._num_sent, decode_rows=self._rows))
            self._num_sent += 1


def echo_placement(name: str, step_ms: float) -> ExecutorPlacement:
    """A device that only takes time, here or in a process."""
    if name == "inline":
        return InlineExecutors(num_ranks=1, capacity=64, load=lambda *_: EchoRunner(step_ms / 1e3))
    return ProcessExecutors(
        config=build_config(Config(), {"model": {"name": str(step_ms)}}),
        max_len=64,
        num_ranks=1,
        capacity=64,
        progress=False,
        module="benchmarks.echo_executor",
    )


async def step_times(name: str, step_ms: float, depth: int, count: int) -> list[float]:
    """Seconds from each result to the next."""
    placement = echo_placement(name, step_ms)
    group = Executors(num_ranks=1, placement=placement, intensity=RestartIntensity(0, 1.0), step_timeout_s=10.0)
    stepper = Stepper(depth, count)
    stepper.connect(group)
    running = asyncio.create_task(group.run())
    await stepper.done.wait()
    group.inbox.put(Stop())
    await running
    return stepper.times[-count:]


async def serve(name: str, overlap: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Tokens per second of all streams, and percentiles of the milliseconds between two tokens of one."""
    sections = {"kv": {"num_pages": 1024}, "scheduler": {"overlap_depth": overlap}, "placement": {"executor": name}}
    system = System(build_config(Config(), sections))
    await system.start()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    gaps: list[float] = []

    async def one(index: int) -> None:
        stream = system.ingress.open(f"def function_{index}(value):\n    ", params)
        last = None
        while True:
            delta = await stream.next()
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            if delta.finish != Finish.RUNNING:
                return

    try:
        await one(0)  # what is done once is done
        gaps.clear()
        started = time.perf_counter()
        await asyncio.gather(*(one(index) for index in range(num_streams)))
        seconds = time.perf_counter() - started
    finally:
        await system.stop()
    p50, p90, p99 = (1e3 * value for value in percentiles(gaps))
    return {"tokens_per_s": num_streams * num_tokens / seconds, "itl_p50_ms": p50, "itl_p90_ms": p90, "itl_p99_ms": p99}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90, p99."""
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[89], cuts[98]


def measure_link(turns: int, count: int) -> list[dict[str, Any]]:
    """Microseconds of a step beyond the device's own; of several turns, which alternate, the best one."""
    rows = []
    for step_ms, depth in ((0.0, 1), (DEVICE_MS, 1), (DEVICE_MS, 2)):
        best: dict[str, tuple[float, float, float]] = {}
        for _ in range(turns):
            for name in PLACEMENTS:
                times = uvloop.run(step_times(name, step_ms, depth, count if not step_ms else count // 5))
                best[name] = min(best.get(name, (math.inf,) * 3), percentiles(times))
        for name in PLACEMENTS:
            p50, p90, p99 = (1e6 * value - 1e3 * step_ms for value in best[name])
            added = 1e6 * (best[name][0] - best["inline"][0])
            rows.append(
                {
                    "device_ms": step_ms,
                    "steps_in_flight": depth,
                    "placement": name,
                    "p50_us": p50,
                    "p90_us": p90,
                    "p99_us": p99,
                    "added_p50_us": added,
                }
            )
    return rows


def measure_engine(turns: int, streams: Sequence[int], num_tokens: int) -> list[dict[str, Any]]:
    """One row per number of streams, steps in flight and placement: of several turns, which alternate, the best one.

    Whatever else runs on the machine can only take away, and from the one as from the other."""
    results: dict[tuple[int, int, str], list[dict[str, float]]] = {}
    for _ in range(turns):
        for num_streams in streams:
            for overlap in (1, 2):
                for name in PLACEMENTS:
                    row = uvloop.run(serve(name, overlap, num_streams, num_tokens))
                    results.setdefault((num_streams, overlap, name), []).append(row)
    return [
        {
            "streams": num_streams,
            "steps_in_flight": overlap,
            "placement": name,
            **max(rows, key=lambda row: row["tokens_per_s"]),
        }
        for (num_streams, overlap, name), rows in results.items()
    ]


def show(link: list[dict[str, Any]], engine: list[dict[str, Any]]) -> None:
    """Two tables."""
    console = Console(width=120)
    title = f"a step of {ROWS} rows: microseconds beyond the device's time"
    table = Table("device ms", "in flight", "placement", "p50", "p90", "p99", "added p50", title=title)
    for row in link:
        *names, _, _, _, _ = row.values()
        table.add_row(*map(str, names), *(f"{row[key]:.0f}" for key in ("p50_us", "p90_us", "p99_us", "added_p50_us")))
    console.print(table)
    table = Table("streams", "in flight", "placement", "tokens/s", "ITL p50 ms", "p90", "p99", "tokens/s to inline")
    for row in engine:
        (inline,) = (
            one["tokens_per_s"]
            for one in engine
            if (one["streams"], one["steps_in_flight"], one["placement"])
            == (row["streams"], row["steps_in_flight"], "inline")
        )
        table.add_row(
            str(row["streams"]),
            str(row["steps_in_flight"]),
            row["placement"],
            f"{row['tokens_per_s']:.0f}",
            *(f"{row[key]:.2f}" for key in ("itl_p50_ms", "itl_p90_ms", "itl_p99_ms")),
            f"{row['tokens_per_s'] / inline:.2f}x",
        )
    console.print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5000, help="of the link's measurement, in each turn")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    arguments = parser.parse_args()
    link = measure_link(arguments.turns, arguments.steps)
    engine = measure_engine(arguments.turns, arguments.streams, arguments.tokens)
    show(link, engine)
    keep(arguments.output, {"turns": arguments.turns, "link": link, "engine": engine})


if __name__ == "__main__":
    main()
