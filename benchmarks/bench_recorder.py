"""What does the flight recorder cost at 64 streams, and how much does it write down in a minute?

Engines of the demo model in one process: without a recorder, a second one without for comparison, with one whose ring
is not full yet, with one whose ring is full, so that each turn plays an old one to the scheduler that lags behind, and
with one that writes a file besides.  They answer the same requests in turns, each time another one first.  Two figures
for each: the processor time of the whole process per token beside the engine without a recorder, and the processor time
that was spent inside the recorder, as a share of all.  The second one does not depend on what else the machine does.
The longest call into the recorder is a pause of the event loop, while a file is written too.

    python benchmarks/bench_recorder.py
    python benchmarks/bench_recorder.py --turns 9 --tokens 256
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.config import Config, build_config
from engine.features.recording.engine import RecordingFeature
from engine.features.recording.recorder import Recorder
from engine.llm import LLM
from engine.types.params import SamplingParams

FULL_BYTES = 200_000  # so small a ring is full at once


class Timed:
    """How long the event loop's thread was in a recorder: processor seconds in all, and of the longest call."""

    def __init__(self, recorder: Recorder) -> None:
        self.cpu_s = self.longest_s = 0.0
        self.num_bytes = self.num_turns = 0
        for name in ("arrived", "planned", "turned"):
            setattr(recorder, name, self._timed(getattr(recorder, name)))
        encode = recorder._encode

        def measured(turn: object) -> bytes:
            encoded = encode(turn)
            self.num_bytes += len(encoded)
            self.num_turns += 1
            return encoded

        recorder._encode = measured

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **keywords: Any) -> None:
            began = time.thread_time()
            method(*arguments, **keywords)
            took_s = time.thread_time() - began
            self.cpu_s += took_s
            self.longest_s = max(self.longest_s, took_s)

        return timed


def new_llm(folder: Path | None) -> LLM:
    tables: dict[str, Any] = {"scheduler": {"max_running": 64}, "kv": {"num_pages": 4096}}
    if folder is not None:
        tables["storage"] = {"folder": str(folder)}
    return LLM(config=build_config(Config(), tables), progress=False)


def run(llm: LLM, num_streams: int, num_tokens: int, seed: int) -> dict[str, float]:
    """One turn of one engine."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 1000, 48).tolist() for _ in range(num_streams)]
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    cpu_s, began = time.process_time(), time.perf_counter()
    llm.generate(prompts, params)
    return {"cpu_s": time.process_time() - cpu_s, "s": time.perf_counter() - began}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.streams, arguments.tokens, arguments.turns)
    show(rows)
    keep(arguments.output, {"rows": rows})


def _recorder(llm: LLM) -> Recorder | None:
    feature = llm._system.features.get("recording")
    return feature.recorder if isinstance(feature, RecordingFeature) else None


def measure(folder: Path, num_streams: int, num_tokens: int, num_turns: int) -> list[dict[str, Any]]:
    ways = {"none": new_llm(None), "none again": new_llm(None)}
    ways |= {way: new_llm(folder) for way in ("ring", "full ring", "and writes")}
    recorders = {way: _recorder(llm) for way, llm in ways.items()}
    timed = {way: Timed(recorder) for way, recorder in recorders.items() if recorder is not None}
    for way in ("full ring", "and writes"):
        recorder = recorders[way]
        assert recorder is not None
        recorder._limit_bytes = FULL_BYTES
    for number, llm in enumerate(ways.values()):
        run(llm, num_streams, num_tokens, number)  # warm, and the small rings are full
    for one in timed.values():
        one.__dict__.update(cpu_s=0.0, longest_s=0.0, num_bytes=0, num_turns=0)
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(num_turns):
        order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
        for way in order:
            llm = ways[way]
            if way == "and writes":
                recorder = recorders[way]
                assert recorder is not None
                llm._loop.call_soon_threadsafe(recorder.write, "asked")
            taken[way].append(run(llm, num_streams, num_tokens, 100 + turn))
    for llm in ways.values():
        llm.close()
    return [row(way, taken, timed.get(way), num_streams * num_tokens * num_turns) for way in ways]


def row(way: str, taken: dict[str, list[dict[str, float]]], timed: Timed | None, num_tokens: int) -> dict[str, Any]:
    cpu_s, seconds = (sum(one[name] for one in taken[way]) for name in ("cpu_s", "s"))
    ratios = [one["cpu_s"] / other["cpu_s"] for one, other in zip(taken[way], taken["none"], strict=True)]
    found = {"recorder": way, "tokens_per_s": num_tokens / seconds, "cpu_ratio": statistics.median(ratios)}
    if timed is None:
        return found
    return {
        **found,
        "recorder_share": timed.cpu_s / cpu_s,
        "us_per_turn": 1e6 * timed.cpu_s / timed.num_turns,
        "longest_ms": 1e3 * timed.longest_s,
        "bytes_per_turn": timed.num_bytes / timed.num_turns,
        "mb_per_minute": timed.num_bytes / seconds * 60 / 1e6,
        "mb_per_minute_at_200_steps_per_s": timed.num_bytes / timed.num_turns * 200 * 60 / 1e6,
    }


def show(rows: list[dict[str, Any]]) -> None:
    titles = ("recorder", "tokens/s", "CPU beside none", "share of CPU", "us a turn", "longest", "MB a minute")
    table = Table(*titles, "at 200 steps/s")
    for one in rows:
        cells = [one["recorder"], f"{one['tokens_per_s']:,.0f}", f"{one['cpu_ratio']:.3f}"]
        if "us_per_turn" in one:
            cells += [
                f"{one['recorder_share']:.2%}",
                f"{one['us_per_turn']:.1f}",
                f"{one['longest_ms']:.2f} ms",
                f"{one['mb_per_minute']:.1f}",
                f"{one['mb_per_minute_at_200_steps_per_s']:.1f}",
            ]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
