"""How much faster is attention in C than torch's on a CPU, for prompts and decode rows in float32?

Both read the same scattered pages in turns; the ratios are medians over turns, of CPU time of all threads.  Results are
compared first.

    python benchmarks/bench_cpu_attention.py
    ATEN_CPU_CAPABILITY=avx2 python benchmarks/bench_cpu_attention.py --threads 2
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine
from rich.console import Console
from rich.table import Table

from engine.kernels.attention import compiled_attention
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.tiles import TiledAttention
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.support.paging import batch_on

# name: query heads, KV heads, head size
HEADS = {"demo": (4, 2, 64), "qwen3-0.6b": (16, 8, 128)}
# (sequences, tokens of each, queries of each)
STEPS = ((1, 128, 128), (1, 400, 400), (1, 1024, 1024), (1, 2048, 256), (8, 16, 16))
STEPS += ((1, 16, 1), (1, 416, 1), (1, 2000, 1), (8, 32, 1), (8, 416, 1), (32, 416, 1))
PAGE_SIZE = 16
TURN_S = 0.02


def cpu_seconds(attend: Callable[[], object]) -> float:
    """Of one call; many are made in ``TURN_S``."""
    start, calls = time.process_time(), 0
    while time.process_time() - start < TURN_S:
        attend()
        calls += 1
    return (time.process_time() - start) / calls


def measure(heads: str, step: tuple[int, int, int], turns: int) -> dict[str, float]:
    """Microseconds in C, and how many times as long the others take."""
    num_heads, num_kv_heads, head_size = HEADS[heads]
    batch, length, queries = step
    spec = AttentionSpec(1, num_heads, num_kv_heads, head_size, head_size**-0.5)
    pages = -(-length // PAGE_SIZE)
    pool = KVPool(1, batch * pages, PAGE_SIZE, num_kv_heads, head_size, torch.float32, torch.device("cpu"))
    pool.data.normal_()
    table_BP = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    lengths, counts = np.full(batch, length, np.int32), np.full(batch, queries, np.int32)
    q_TNH = torch.randn((batch * queries, num_heads, head_size))
    compiled = compiled_attention(spec, pool)
    if compiled is None:
        raise SystemExit("there is no C compiler")
    backends = {"C": compiled, "torch": TorchAttention(spec, pool), "tiles": TiledAttention(spec, pool)}
    for backend in backends.values():
        backend.plan_step(batch_on(torch.device("cpu"), batch if queries == 1 else 0, table_BP, lengths, counts))
        torch.testing.assert_close(backend.attend(0, q_TNH), compiled.attend(0, q_TNH))
    taken: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(turns):
        for name, backend in backends.items():
            taken[name].append(cpu_seconds(lambda backend=backend: backend.attend(0, q_TNH)))  # type: ignore[misc]
    ratios = {
        name: statistics.median(one / base for one, base in zip(taken[name], taken["C"], strict=True))
        for name in ("torch", "tiles")
    }
    return {"C_us": statistics.median(taken["C"]) * 1e6, **ratios}


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    level = torch.backends.cpu.get_cpu_capability()
    table = Table("heads", "sequences", "tokens", "queries", "C us", "torch / C", "tiles / C", title=level)
    results = []
    with torch.inference_mode():
        for heads in HEADS:
            for step in STEPS:
                found = measure(heads, step, arguments.turns)
                results.append({"heads": heads, "step": step, **found})
                table.add_row(heads, *map(str, step), *(f"{one:.2f}" for one in found.values()))
    Console().print(table)
    if arguments.json is not None:
        what = {"machine": describe_machine(), "level": level, "threads": arguments.threads, "results": results}
        arguments.json.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
