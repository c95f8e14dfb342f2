"""What do adapters cost a decode step on this CPU?

Whole steps of the engine's runner, sampling included, in turns: without adapters being served, with none of the step's
rows having one, with one adapter for all rows, and with four among them.  Figures are medians of the CPU time that the
process takes, as multiples of the first.  The first model has a quarter of Qwen3-0.6B's layers and vocabulary at its
sizes, so that its weights are read from memory as those of a whole one are; the other is the demo model.

    python benchmarks/bench_lora.py
    python benchmarks/bench_lora.py --rank 16 --quantization float16 --models demo
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gpu_sections.shapes import QWEN3_06B
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from engine.config import Config, build_config
from engine.control.system import System
from engine.features.lora.files import (
    NAME,
    Adapter,
    AdapterRules,
    Placement,
    adaptable_modules,
    read_adapter,
    tensor_name,
)
from engine.messages import Admission, Step
from engine.startup.loading import load_runner
from engine.types.params import SamplingParams

NUM_ADAPTERS = 4
PROMPT = 32
ROWS = (1, 8, 16)
DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
QUARTER = {**QWEN3_06B, "num_hidden_layers": 7, "vocab_size": 151936 // 4}
WAYS = ("not served", "no row has one", "one", f"{NUM_ADAPTERS} mixed")


class Bench:
    """A runner with so many rows for each way, all of which have read a prompt."""

    def __init__(self, system: System, adapters: list[Adapter], ways: dict[str, list[int]]) -> None:
        """ways: name -> which adapter its rows have, in turn; 0 for none."""
        self._runner = load_runner(
            system.config, system.spec, system.max_len, system.engine.plugins, rank=0, progress=False
        )
        self._step = 0
        self._first = {way: index * max(ROWS) for index, way in enumerate(ways)}
        placed: set[int] = set()
        for way, slots in ways.items():
            for number in range(max(ROWS)):
                slot = slots[number % len(slots)]
                place = adapters[slot - 1] if slot and slot not in placed else None
                placed.add(slot)
                self._admit(self._first[way] + number, slot, place)

    def _admit(self, row: int, slot: int, adapter: Adapter | None) -> None:
        pages = np.arange(row * 16, row * 16 + 16, dtype=np.int32).tobytes()
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        ids = (np.arange(PROMPT, dtype=np.int32) + row) % 200
        admission = Admission(
            row=row,
            token_ids=ids.tobytes(),
            num_prompt_tokens=PROMPT,
            num_computed_tokens=0,
            pages=pages,
            params=params,
        )
        placed = msgspec.msgpack.encode([Placement(row, slot, adapter)])
        columns = [np.array([value], dtype=np.int32).tobytes() for value in (row, 0, PROMPT, 1)]
        names = ("prefill_rows", "prefill_starts", "prefill_lengths", "prefill_samples")
        self._launch(admissions=(admission,), parts={NAME: placed}, **dict(zip(names, columns, strict=True)))

    def _launch(self, **fields: Any) -> None:
        self._step += 1
        self._runner.launch(Step(step_id=self._step, **fields)).collect()

    def decode(self, way: str, num_rows: int) -> None:
        """One step of the first rows of a way."""
        first = self._first[way]
        self._launch(decode_rows=np.arange(first, first + num_rows, dtype=np.int32).tobytes())


def write_adapters(folder: Path, modules: dict[str, tuple[int, int]], rank: int) -> None:
    """As PEFT saves them, of random numbers, for all modules."""
    for number in range(NUM_ADAPTERS):
        path = folder / f"adapter{number}"
        path.mkdir(parents=True)
        tensors = {}
        for name, (outputs, inputs) in modules.items():
            tensors[tensor_name(name, "A")] = torch.randn(rank, inputs) / 100
            tensors[tensor_name(name, "B")] = torch.randn(outputs, rank) / 100
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16}))


def system_of(model: str, folder: Path, lora: dict[str, Any], args: argparse.Namespace, num_ways: int) -> System:
    path, load_format = str(DEMO), "safetensors"
    if model != "demo":
        path, load_format = str(folder / "model"), "dummy"
    tables = {
        "model": {
            "path": path,
            "load_format": load_format,
            "tokenizer": "none",
            "max_model_len": 256,
            "quantization": args.quantization,
        },
        "device": {"kind": "cpu", "threads": args.threads},
        "kv": {"num_pages": max(ROWS) * num_ways * 16, "page_size": 16},
        "scheduler": {"max_running": max(ROWS) * num_ways, "max_step_tokens": 256},
        "lora": lora,
    }
    return System(build_config(Config(), tables))


def in_turns(ways: dict[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Median CPU seconds of each."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 2):
        for way, run in ways.items():
            begun = time.process_time()
            run()
            if turn > 1:
                taken[way].append(time.process_time() - begun)
    return {way: statistics.median(times) for way, times in taken.items()}


def measure(model: str, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Rows -> way -> median CPU seconds of a step."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(QUARTER))
        plain = system_of(model, folder, {}, args, 1)
        modules = adaptable_modules(plain.spec.shape)
        write_adapters(folder / "adapters", modules, args.rank)
        lora = {"folder": str(folder / "adapters"), "max_adapters": NUM_ADAPTERS, "max_rank": args.rank}
        rules = AdapterRules(str(folder / "adapters"), args.rank, modules)
        adapters = [read_adapter(path, rules) for path in sorted((folder / "adapters").iterdir())]
        without = Bench(plain, [], {WAYS[0]: [0]})
        four = [number + 1 for number in range(NUM_ADAPTERS)]
        served = Bench(system_of(model, folder, lora, args, 3), adapters, {WAYS[1]: [0], WAYS[2]: [1], WAYS[3]: four})
        found = {}
        for rows in ROWS:
            runs: dict[str, Callable[[], None]] = {WAYS[0]: lambda rows=rows: without.decode(WAYS[0], rows)}
            for way in WAYS[1:]:
                runs[way] = lambda rows=rows, way=way: served.decode(way, rows)
            found[rows] = in_turns(runs, args.turns)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("quarter", "demo"), default=["quarter", "demo"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quantization", default="none")
    args = parser.parse_args()
    console = Console(width=120)
    console.print(describe_machine())
    for model in args.models:
        title = f"{model}, rank {args.rank}, {args.threads} threads, quantization {args.quantization}"
        table = Table("rows", f"{WAYS[0]}, ms", *WAYS[1:], title=title)
        for rows, found in measure(model, args).items():
            base = found[WAYS[0]]
            table.add_row(str(rows), f"{1e3 * base:.2f}", *(f"{found[way] / base:.3f}" for way in WAYS[1:]))
        console.print(table)
        gc.collect()


if __name__ == "__main__":
    main()
