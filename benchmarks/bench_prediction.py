"""Four replicas that are predicted, and the same four for real: times to first tokens, through the router.

    python benchmarks/bench_prediction.py --json benchmarks/results/prediction_2core_cpu.json

Four engines of the demo model, one thread each, behind the router answer prompts that come at fixed times and share
beginnings.  The first half of the time is to learn from: the durations of its steps fit a model of steps, and single
requests on the idle fleet give what HTTP, the router and the tokenizer add.  Then the simulation of
``bench_thousand_replicas.py``, the real router and planners in virtual time, gets the prompts of the second half and
predicts its times to first tokens.  The last lines are predicted over measured.  All engines share the machine's
cores, and the durations of steps have that in them.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from bench_thousand_replicas import Fleet, Turn, percentile
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.config import Config, build_config
from engine.features.traffic.sizes import StepSize
from engine.features.traffic.trace import TracedStep, read_trace
from server.extensions.handover.processes import LocalFleet
from server.extensions.replicas.router import routing
from server.extensions.whatif.costs import StepCosts
from server.http.listener import bind, url_of

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
REPLICAS, ROWS, PAGES = 4, 8, 400
NUM_SINGLE = 12
NEAR = 60  # steps of about a size, on each side


def prompts(seed: int, per_s: float, span_s: float, vocabulary: int) -> list[Turn]:
    """Prompts by the time at which they come.  Each begins as one of a dozen does."""
    rng = np.random.default_rng(seed)
    beginnings = [rng.integers(8, vocabulary, int(rng.integers(200, 600)), dtype=np.int32) for _ in range(12)]
    turns, at = [], 0.0
    while (at := at + float(rng.exponential(1 / per_s))) < span_s:
        own = rng.integers(8, vocabulary, int(rng.integers(40, 400)), dtype=np.int32)
        prompt = np.concatenate((beginnings[int(rng.integers(12))], own))
        turns.append(Turn("chat", len(turns), prompt, int(rng.integers(4, 24)), at, deque()))
    return turns


async def first_token_s(session: aiohttp.ClientSession, url: str, prompt: np.ndarray, num_output: int) -> float:
    """Send a prompt and return the time to the first token of its answer."""
    body = {
        "model": "demo_model", "prompt": prompt.tolist(), "max_tokens": num_output, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    began, first = time.monotonic(), float("nan")
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {") and first != first:
                first = time.monotonic() - began
    return first


async def measured(arguments: argparse.Namespace, folder: str) -> tuple[list[Turn], list[float], list[float], float]:
    """Return the prompts, their times to first tokens, those of single requests, and when the second half began."""
    settings = {
        "model": {"path": str(DEMO)},
        "device": {"threads": 1},
        "kv": {"page_size": 64, "num_pages": PAGES},
        "scheduler": {"max_running": ROWS, "max_step_tokens": 1024, "prefill_chunk": 1024},
        "storage": {"folder": folder, "trace_mb": 50},
    }
    config = build_config(Config(), settings)
    fleet = LocalFleet(config, REPLICAS)
    try:
        with bind("127.0.0.1", 0) as listener:
            connector = aiohttp.TCPConnector(limit=0)
            async with (
                routing(config, fleet, listener) as replicas,
                aiohttp.ClientSession(connector=connector) as session,
            ):
                for one in replicas.all:
                    await one.settled.wait()
                if arguments.waits:
                    print("ready", flush=True)
                    await asyncio.to_thread(sys.stdin.readline)
                url = url_of(listener)
                rng = np.random.default_rng(0)
                single = [
                    await first_token_s(session, url, rng.integers(8, 300, 64, dtype=np.int32), 1)
                    for _ in range(NUM_SINGLE)
                ]
                turns = prompts(arguments.seed, arguments.rate, arguments.seconds, 300)
                began = time.monotonic()
                clock_at = time.monotonic()

                async def ask(turn: Turn) -> float:
                    await asyncio.sleep(max(0.0, began + turn.at - time.monotonic()))
                    return await first_token_s(session, url, turn.prompt, turn.num_output)

                waits = await asyncio.gather(*map(ask, turns))
                return turns, waits, single, clock_at + arguments.seconds / 2
    finally:
        fleet.close()


class SpreadCosts:
    """Durations of steps as they were measured: the model's, times the error that it had for a step of about this size.

    The mean of each size says what a median request waits; the slow ones wait for steps that others held up."""

    def __init__(self, steps: list[TracedStep], seed: int) -> None:
        self.costs = StepCosts(steps)
        told = np.array([self.costs.seconds(step.size) for step in steps])
        order = np.argsort(told)
        self._told = told[order]
        self._errors = np.array([step.seconds for step in steps])[order] / np.maximum(self._told, 1e-6)
        self._rng = np.random.default_rng(seed)

    def seconds(self, size: StepSize) -> float:
        """Return a duration of a step of this size."""
        told = self.costs.seconds(size)
        at = int(np.searchsorted(self._told, told))
        low, high = max(0, at - NEAR), min(len(self._told), at + NEAR)
        return float(told * self._errors[self._rng.integers(low, high)])


def predicted(turns: list[Turn], costs: StepCosts | SpreadCosts, seed: int) -> list[float]:
    """Return the times to first tokens that the simulation gives the prompts."""
    settings = argparse.Namespace(
        replicas=REPLICAS, routers=1, rows=ROWS, pages=PAGES, seed=seed, start=0, faults=0.0, seconds=turns[-1].at,
        sessions=1.0, target=1.0,
    )  # fmt: skip
    fleet = Fleet(settings, "prefix", costs.seconds)
    for turn in turns:
        fleet.at(turn.at, lambda turn=turn: fleet._ask(turn))  # type: ignore[misc]
    fleet.drain()
    first = {turn.session: turn.first_at - turn.at for turn in fleet.done}
    return [first[turn.session] for turn in turns]


def main() -> None:
    """Measure, predict and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="prompts a second, of all replicas")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, help="a folder that keeps the recorded steps")
    parser.add_argument("--waits", action="store_true", help="wait for a line of input before the first request")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = str(arguments.traces or stack.enter_context(tempfile.TemporaryDirectory()))
        turns, waits, single, middle = asyncio.run(measured(arguments, folder))
        steps: list[TracedStep] = []
        for path in Path(folder).rglob("*.jsonl"):
            steps += read_trace(path).steps
    half = arguments.seconds / 2
    learnt = [step for step in steps if step.at < middle]
    spread = SpreadCosts(learnt, arguments.seed)
    costs = spread.costs
    alone = costs.seconds(StepSize(decodes=0, context=0, prefills=1, prefill_tokens=64, pairs=64 * 65 // 2, copies=0))
    added_s = max(0.0, statistics.median(single) - alone)
    second = [(turn, wait) for turn, wait in zip(turns, waits, strict=True) if turn.at >= half]
    ways: dict[str, StepCosts | SpreadCosts] = {"mean durations": costs, "with their spread": spread}
    told = {
        way: [
            wait + added_s
            for turn, wait in zip(turns, predicted(turns, one, arguments.seed), strict=True)
            if turn.at >= half
        ]
        for way, one in ways.items()
    }
    real = [wait for _, wait in second]
    table = Table("time to first token, ms", "measured", *(f"{way}, over measured" for way in ways))
    figures: dict[str, Any] = {
        "requests": len(real),
        "steps": len(learnt),
        "added_ms": 1e3 * added_s,
    }
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        one = percentile(real, share)
        others = {way: percentile(waits_s, share) for way, waits_s in told.items()}
        figures[name] = {"measured_ms": 1e3 * one, **{way: other / one for way, other in others.items()}}
        cells = (f"{1e3 * other:.1f}, {other / one:.2f}" for other in others.values())
        table.add_row(name, f"{1e3 * one:.1f}", *cells)
    Console().print(table)
    print(json.dumps(figures))
    keep(arguments.output, figures)


if __name__ == "__main__":
    main()
