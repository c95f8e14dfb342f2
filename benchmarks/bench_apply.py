"""How long streams pause while settings change under them: ``python -m benchmarks.bench_apply``.

64 greedy streams of the demo model go on while six changes follow each other, then six that change numerics as well.
Each line says what changed, on which road, and how long it took in all; the longest gap between two tokens of a stream
around it, as the 99th percentile over streams and the longest of all, and how many times as long that is as before the
first change.  After the first six it says how many outputs equal those of a run that nobody disturbed.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.actors.stream import Stream
from engine.config import Config, build_config
from engine.control.changeover import Changeover
from engine.control.system import System
from engine.messages import Delta, Finish
from engine.types.params import SamplingParams

NUM_STREAMS = 64
ON_THE_WAY_S = 0.02  # until the last tokens of the old executors have been read
BETWEEN_S = 0.5  # undisturbed, before and after each change
Tables = dict[str, dict[str, Any]]
SAME: list[Tables] = [
    {"kv": {"num_pages": 4000}},
    {"kv": {"page_size": 32, "num_pages": 1600}},
    {"plugins": {"policy": "lpm", "eviction": "fifo"}},
    {"scheduler": {"max_step_tokens": 1024}},
    {"plugins": {"linear": "onednn"}},
    {"limits": {"max_queued_tokens": 1_000_000}, "scheduler": {"prefill_chunk": 128}},
]
OTHER: list[Tables] = [
    {"kv": {"dtype": "int8"}},
    {"plugins": {"linear": "auto"}, "model": {"quantization": "int8"}},
    {"plugins": {"linear": "torch"}, "model": {"quantization": "none"}},
    {"kv": {"dtype": "auto", "num_pages": 3500}},
    {"model": {"dtype": "bfloat16"}},
    {"model": {"dtype": "float32"}},
]


@dataclass
class Reader:
    """One stream's tokens, and when each delta came."""

    stream: Stream
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        finish = Finish.RUNNING
        while finish == Finish.RUNNING:
            delta: Delta = await self.stream.next()
            self.times.append(time.perf_counter())
            self.tokens += np.frombuffer(delta.token_ids, dtype=np.int32).tolist()
            finish = delta.finish
            self.came.set()

    def longest_gap(self, begin: float, end: float) -> float:
        """Between two deltas of which one came within the time, or 0."""
        times = np.array(self.times)
        gaps = np.diff(times)
        near = (times[1:] >= begin) & (times[:-1] <= end)
        return float(gaps[near].max(initial=0.0))


async def run(config: Config, changes: list[Tables], num_tokens: int) -> list[list[int]]:
    system = System(config)
    await system.start()
    changeover, params = Changeover(system), SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [[(7 * number + place) % 500 for place in range(20 + number)] for number in range(NUM_STREAMS)]
    readers = [Reader(system.ingress.open(prompt, params)) for prompt in prompts]
    reading = [asyncio.create_task(reader.read()) for reader in readers]
    spans: list[tuple[str, float, float]] = []
    await asyncio.sleep(2 * BETWEEN_S)
    spans.append(("undisturbed", time.perf_counter() - BETWEEN_S, time.perf_counter()))
    for tables in changes:
        config, began = build_config(config, tables), time.perf_counter()
        outcome = await changeover.apply(config)
        what = ", ".join(f"{one.key}={one.after}" for one in outcome.changes)
        await asyncio.sleep(ON_THE_WAY_S)
        spans.append((f"{what} ({outcome.road}, {outcome.took_s:.2f} s)", began, time.perf_counter()))
        for reader in readers:
            reader.came.clear()
        running = (reader for reader, task in zip(readers, reading, strict=True) if not task.done())
        await asyncio.gather(*(reader.came.wait() for reader in running))  # else two changes would be one pause
        await asyncio.sleep(BETWEEN_S)
    if changes:
        print(f"{sum(not one.done() for one in reading)} of {NUM_STREAMS} streams run after the last change")
    await asyncio.gather(*reading)
    await system.stop()
    usual = np.percentile([reader.longest_gap(*spans[0][1:]) for reader in readers], 99)
    for what, begin, end in spans:
        gaps = [reader.longest_gap(begin, end) for reader in readers]
        p99 = np.percentile(gaps, 99)
        print(f"pause p99 {p99:6.3f} s  max {max(gaps):6.3f} s  {p99 / usual:5.1f} x undisturbed  {what}", flush=True)
    assert all(len(reader.tokens) == num_tokens for reader in readers), "a token was lost or came twice"
    return [reader.tokens for reader in readers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=480, help="output of each stream (default: 480)")
    num_tokens = parser.parse_args().tokens
    base = build_config(
        Config(),
        {
            "device": {"kind": "cpu", "threads": 1},
            "kv": {"num_pages": 3000},
            "plugins": {"attention": "torch", "linear": "torch"},
        },
    )
    expected = asyncio.run(run(base, [], num_tokens))
    same = asyncio.run(run(base, SAME, num_tokens))
    print(f"numerics unchanged: {sum(a == b for a, b in zip(same, expected, strict=True))} of {NUM_STREAMS} equal")
    asyncio.run(run(base, OTHER, num_tokens))


if __name__ == "__main__":
    main()
