"""What do graphs cost at start, and what do compiled pieces bring on a CPU?

    python benchmarks/bench_graphs.py --output benchmarks/results/graphs.json
    python benchmarks/bench_graphs.py --device cpu --model demo

On a GPU: seconds and memory of capturing decode graphs and piecewise ones, with and without the warm-up capture, in
descending and ascending order, into one pool and into a pool for each size.  Every way is a process of its own, so that
none finds memory or kernels that another one left.  Ratios are to the way that the engine goes.

On a CPU, which captures nothing: steps with prompts by graphs.mode=compiled against the model as it is, in turns in one
process, by the number of tokens; and seconds of the first start, which compiles, and of the second, each in its own
process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_sections.captures import WAYS, capture_costs
from gpu_sections.shapes import QWEN3_06B
from gpu_sections.stepping import captures
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from callboard import LLM, SamplingParams

TOKENS = (2, 8, 16, 32, 64, 128, 256, 512)
TIMEOUT_S = 300.0
Row = dict[str, Any]


def in_own_process(way: str, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one way to capture."""
    command = [sys.executable, __file__, "--way", way, "--model", arguments.model, "--device", arguments.device]
    command += ["--max-tokens", str(arguments.max_tokens), "--max-rows", str(arguments.max_rows)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [{"case": way, "problem": f"not done in {TIMEOUT_S:g} s"}]
    if done.returncode:
        return [{"case": way, "problem": done.stderr.strip().splitlines()[-1][:200] if done.stderr else "died"}]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def start_in_own_process(case: str, arguments: argparse.Namespace) -> Row:
    """Seconds until an engine with compiled pieces is ready, imports left out."""
    command = [sys.executable, __file__, "--start", "--device", "cpu", "--model", arguments.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return {"case": case, "seconds": float(done.stdout.split()[-1])}


def on_gpu(arguments: argparse.Namespace) -> list[Row]:
    """Every way, and its ratio to the engine's own."""
    rows = [row for way in WAYS for row in in_own_process(way, arguments)]
    for row in rows:
        own = next((one for one in rows if one["case"] == "engine" and one.get("what") == row.get("what")), None)
        if own is not None and "seconds" in row:
            row["of_engine_s"] = row["seconds"] / own["seconds"]
            row["of_engine_mb"] = row["mb"] / own["mb"]
    return rows


def on_cpu(arguments: argparse.Namespace, model: str, turns: int) -> list[Row]:
    """Prefill time by tokens, compiled and plain in turns; start-up time with an empty compile cache and a full one."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing that was compiled before
        rows = [start_in_own_process(case, arguments) for case in ("first start", "second start")]
        with _engine(model, "compiled", arguments) as compiled, _engine(model, "off", arguments) as plain:
            rows += [_compare(compiled, plain, num_tokens, turns) for num_tokens in arguments.tokens]
    return rows


def _engine(model: str, mode: str, arguments: argparse.Namespace) -> LLM:
    device = {"kind": "cpu", "threads": arguments.threads}
    checkpoint = {"load_format": "safetensors" if model == "demo" else "dummy", "tokenizer": "none"}
    scheduler = {"prefill_chunk": TOKENS[-1], "max_step_tokens": TOKENS[-1]}
    kv = {"num_pages": 512}
    graphs = {"mode": mode}
    return LLM(
        model,
        progress=False,
        config={"device": device, "model": checkpoint, "scheduler": scheduler, "kv": kv, "graphs": graphs},
    )


def _compare(compiled: LLM, plain: LLM, num_tokens: int, turns: int) -> Row:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds: dict[str, list[float]] = {"compiled": [], "plain": []}
    for turn in range(turns):
        # A new prompt each time: nothing of it is cached.
        prompt = np.random.default_rng((num_tokens, turn)).integers(0, 500, num_tokens).tolist()
        for name, llm in (("compiled", compiled), ("plain", plain))[:: 1 if turn % 2 else -1]:
            seconds[name].append(_timed(partial(llm.generate, [prompt], params)))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "case": f"{num_tokens} tokens",
        "compiled_ms": medians["compiled"] * 1e3,
        "plain_ms": medians["plain"] * 1e3,
        "of_plain": medians["compiled"] / medians["plain"],
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def show(rows: Sequence[Row]) -> None:
    """The table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys)
    for row in rows:
        values = [row.get(key, "") for key in keys]
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """argv: of the command line, without the program's name."""
    parser = new_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default, help="default: a GPU where there is one")
    parser.add_argument("--model", default="qwen3-0.6b", help="'qwen3-0.6b' (its shape, random weights), or 'demo'")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each case on a CPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="sizes of a prompt on a CPU, up to 512")
    parser.add_argument("--max-tokens", type=int, default=1024, help="the largest captured step with prompts")
    parser.add_argument("--max-rows", type=int, default=64, help="the largest captured decode batch")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "bench_graphs: torch sees no GPU; --device cpu measures what compiled pieces bring there\n")
    with tempfile.TemporaryDirectory() as directory:
        model = "demo"
        if arguments.model != "demo":
            (Path(directory) / "config.json").write_text(json.dumps(QWEN3_06B))
            model = directory
        if arguments.way:
            for row in capture_costs(model, arguments.way, arguments.max_tokens, arguments.max_rows, device):
                print(json.dumps(row), flush=True)
            return
        if arguments.start:
            print(_timed(lambda: _engine(model, "compiled", arguments).close()))
            return
        if captures(device):
            rows = on_gpu(arguments)
        else:
            print("a CPU captures nothing: capture time, memory, order, pools are measured on a GPU", file=sys.stderr)
            rows = on_cpu(arguments, model, arguments.turns)
    show(rows)
    keep(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
