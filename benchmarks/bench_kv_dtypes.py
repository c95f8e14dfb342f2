"""What do pages of fewer bits cost on a CPU?  Decode attention over each ``kv.dtype``, beside the model's own type.

All read the same keys and values in one run, in turns, over several layers of scattered pages; the numbers are ratios
of a turn's times.  Beside them: the bytes of a page, and how far results are from those of float32 pages, relative to
their size.

    python benchmarks/bench_kv_dtypes.py
    python benchmarks/bench_kv_dtypes.py --threads 1 2 --batches 1 8 --lengths 1024 4096
"""

import statistics
import time
from itertools import product

import numpy as np
import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.support.paging import batch_on

# name: query heads, KV heads, head size
HEADS = {"qwen3-0.6b": (16, 8, 128), "demo": (4, 2, 64)}
KV_DTYPES = ("", "bfloat16", "float16", "int8", "fp8_e4m3")
PAGE_SIZE = 16
NUM_LAYERS = 2
CPU = torch.device("cpu")


class Candidate:
    """Attention over a pool of one type.  Keys and values are drawn by a seed, the same for all."""

    def __init__(self, kv_dtype: str, spec: AttentionSpec, batch_size: int, length: int) -> None:
        num_pages = batch_size * length // PAGE_SIZE
        heads = (spec.num_kv_heads, spec.head_size)
        self.page_bytes = KVPool.page_bytes(1, PAGE_SIZE, *heads, torch.float32, kv_dtype)
        pool = KVPool(NUM_LAYERS, num_pages, PAGE_SIZE, *heads, torch.float32, CPU, kv_dtype=kv_dtype)
        generator = torch.Generator().manual_seed(0)
        for layer, page in product(range(NUM_LAYERS), range(0, num_pages, 64)):
            slots_T = torch.arange(page * PAGE_SIZE, min(page + 64, num_pages) * PAGE_SIZE)
            pool.store(layer, *torch.randn((2, len(slots_T), *heads), generator=generator), slots_T)
        pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        lengths, ones = np.full(batch_size, length, np.int32), np.ones(batch_size, np.int32)
        self._attention = TorchAttention(spec, pool)
        self._attention.plan_step(batch_on(CPU, batch_size, pages.reshape(batch_size, -1), lengths, ones))

    def attend(self, q_TNH: Tensor) -> Tensor:
        """Of the last layer; all are computed."""
        return [self._attention.attend(layer, q_TNH) for layer in range(NUM_LAYERS)][-1]


def measure(heads: str, batch_size: int, length: int, turns: int) -> list[dict[str, float | str]]:
    """Of each type: microseconds of a layer, times as slow as float32 pages, bytes, error."""
    num_heads, num_kv_heads, head_size = HEADS[heads]
    spec = AttentionSpec(NUM_LAYERS, num_heads, num_kv_heads, head_size, head_size**-0.5)
    candidates = {name: Candidate(name, spec, batch_size, length) for name in KV_DTYPES}
    q_TNH = torch.randn(batch_size, num_heads, head_size, generator=torch.Generator().manual_seed(1))
    exact = candidates[""].attend(q_TNH)
    seconds: dict[str, list[float]] = {name: [] for name in KV_DTYPES}
    for _ in range(turns):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate.attend(q_TNH)
            seconds[name].append((time.perf_counter() - start) / NUM_LAYERS)
    return [
        {
            "kv_dtype": name or "float32",
            "us_per_layer": statistics.median(seconds[name]) * 1e6,
            "times_as_long": statistics.median(
                one / base for one, base in zip(seconds[name], seconds[""], strict=True)
            ),
            "page_bytes_share": candidate.page_bytes / candidates[""].page_bytes,
            "error": float((candidate.attend(q_TNH) - exact).norm() / exact.norm()),
        }
        for name, candidate in candidates.items()
    ]


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()], help="torch threads")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], help="multiples of 16")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--turns", type=int, default=11)
    arguments = parser.parse_args()
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        title = f"decode attention by kv.dtype, {threads} torch threads, {torch.backends.cpu.get_cpu_capability()}"
        table = Table("heads", "batch", "length", "pages", "us a layer", "x float32", "bytes", "error", title=title)
        for heads, batch_size, length in product(arguments.heads, arguments.batches, arguments.lengths):
            with torch.inference_mode():
                rows = measure(heads, batch_size, length, arguments.turns)
            for row in rows:
                results.append({"heads": heads, "batch": batch_size, "length": length, "threads": threads, **row})
                us, ratio = f"{row['us_per_layer']:.0f}", f"{row['times_as_long']:.2f}"
                share, error = f"{row['page_bytes_share']:.2f}", f"{row['error']:.1e}"
                table.add_row(heads, str(batch_size), str(length), str(row["kv_dtype"]), us, ratio, share, error)
        Console().print(table)
    keep(arguments.output, {"results": results})


if __name__ == "__main__":
    main()
