"""Executors that are killed or hang in the middle of many streams: does every stream go on as if nothing had been?

The demo model, 32 streams at once, every other one sampled with a seed.  First undisturbed; then, at a random moment of
each round, the executor gets SIGKILL, in as many rounds again SIGSTOP.  Every stream must be the undisturbed one, token
for token; one that is not makes this script fail.  Reported: how long until the new executor was ready, and how long
the streams stood still.

    python benchmarks/bench_recovery.py --rounds 20 --json benchmarks/results/recovery_2core_cpu.json
"""

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from engine.actors.stream import Stream
from engine.config import Config, build_config
from engine.control.system import System
from engine.messages import Finish
from engine.types.params import SamplingParams

NUM_STREAMS = 32
SILENCE_S = 2.0  # after which a hung executor is given up


def params(index: int, num_tokens: int) -> SamplingParams:
    """Greedy or drawn from few candidates: near ties, which float rounding decides, are rare among those."""
    if index % 2:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(temperature=0.8, top_k=4, seed=100 + index, max_tokens=num_tokens, ignore_eos=True)


class Round:
    """All streams, read to their end.  ``due`` is set when a share ``moment`` of all their tokens has come."""

    def __init__(self, system: System, num_tokens: int, moment: float = 0.0) -> None:
        self.tokens: list[bytes] = [b""] * NUM_STREAMS
        self.longest_gap_s = 0.0
        self.due = asyncio.Event()
        self._missing_bytes = int(4 * NUM_STREAMS * num_tokens * moment)
        self._reading = [
            asyncio.create_task(
                self._read(index, system.ingress.open(f"def function_{index}(value):\n    ", params(index, num_tokens)))
            )
            for index in range(NUM_STREAMS)
        ]

    async def _read(self, index: int, stream: Stream) -> None:
        last = None
        while True:
            delta = await stream.next()
            now = time.perf_counter()
            if last is not None:
                self.longest_gap_s = max(self.longest_gap_s, now - last)
            last = now
            self.tokens[index] += delta.token_ids
            self._missing_bytes -= len(delta.token_ids)
            if self._missing_bytes <= 0:
                self.due.set()
            if delta.finish != Finish.RUNNING:
                return

    @property
    def running(self) -> bool:
        """Whether some stream has not ended."""
        return not all(task.done() for task in self._reading)

    async def end(self) -> None:
        """Wait until every stream has ended."""
        await asyncio.gather(*self._reading)


def executor_pids() -> list[int]:
    """Our children."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for children in lists for pid in children.read_text().split()]


async def run(rounds: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """All rounds on one engine."""
    rng = random.Random(seed)
    placement = {"executor": "process", "silence_timeout_s": SILENCE_S, "max_restarts": 1000}
    system = System(build_config(Config(), {"kv": {"num_pages": 1024}, "placement": placement}))
    await system.start()
    report: dict[str, Any] = {}
    try:
        started = time.perf_counter()
        undisturbed = Round(system, num_tokens)
        await undisturbed.end()
        duration_s = time.perf_counter() - started
        report |= {"streams": NUM_STREAMS, "tokens_each": num_tokens, "undisturbed_s": duration_s, "faults": {}}
        for number in (signal.SIGKILL, signal.SIGSTOP):
            recoveries, gaps, num_wrong = [], [], 0
            for _ in tqdm(range(rounds), desc=number.name, disable=not sys.stderr.isatty()):
                disturbed = Round(system, num_tokens, moment=0.9 * rng.random())
                await disturbed.due.wait()
                assert disturbed.running, "the streams had ended before the executor was hit"
                before = system.executors.num_restarts
                (pid,) = executor_pids()
                os.kill(pid, number)
                await disturbed.end()
                assert system.executors.num_restarts == before + 1
                num_wrong += sum(a != b for a, b in zip(disturbed.tokens, undisturbed.tokens, strict=True))
                recoveries.append(system.executors.last_recovery_s)
                gaps.append(disturbed.longest_gap_s)
            report["faults"][number.name] = {
                "rounds": rounds,
                "streams_that_differ": num_wrong,
                "ready_again_s": spread(recoveries),
                "streams_stood_still_s": spread(gaps),
            }
    finally:
        await system.stop()
    return report


def spread(values: list[float]) -> dict[str, float]:
    """Least, median, most."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each fault")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    arguments = parser.parse_args()
    report = uvloop.run(run(arguments.rounds, arguments.tokens, arguments.seed))
    table = Table("fault", "rounds", "streams", "that differ", "ready again s, median (most)", "stood still s")
    for name, row in report["faults"].items():
        ready, still = row["ready_again_s"], row["streams_stood_still_s"]
        table.add_row(
            name,
            str(row["rounds"]),
            str(row["rounds"] * NUM_STREAMS),
            str(row["streams_that_differ"]),
            f"{ready['median']:.2f} ({ready['max']:.2f})",
            f"{still['median']:.2f} ({still['max']:.2f})",
        )
    Console().print(table)
    keep(arguments.output, report)
    if any(row["streams_that_differ"] for row in report["faults"].values()):
        sys.exit("a stream differs from the undisturbed one")


if __name__ == "__main__":
    main()
