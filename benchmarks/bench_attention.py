"""How should decode attention on a CPU read a paged pool: in place, copied, or as one padded batch?

All ways compute the same thing, in turns, over several layers of a pool larger than the caches.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --threads 1 --batches 1 8 32 --lengths 512
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.plugins.attention import torch as backend
from engine.plugins.attention.torch import TorchAttention

# name: query heads, KV heads, head size
HEADS = {"qwen3-0.6b": (16, 8, 128), "demo": (4, 2, 64)}
PAGE_SIZE = 16
NUM_LAYERS = 4
NUM_TURNS = 15

Way = Callable[[int], Tensor]


def ways(spec: AttentionSpec, pool: KVPool, q_TNH: Tensor, batch_size: int, length: int) -> Iterator[tuple[str, Way]]:
    """(name, attention of one layer): pages side by side first, then the same work over shuffled pages.

    Every sequence of the batch has ``length`` tokens.
    """
    pages = np.arange(batch_size * length // PAGE_SIZE, dtype=np.int32).reshape(batch_size, -1)
    shuffled = np.random.default_rng(0).permuted(pages.ravel()).reshape(pages.shape)
    slots = torch.from_numpy(shuffled.repeat(PAGE_SIZE, 1) * PAGE_SIZE + np.arange(length) % PAGE_SIZE).long()
    group = spec.num_heads // spec.num_kv_heads
    mask = torch.zeros(batch_size, 1, 1, length)

    def naive(layer: int) -> Tensor:
        k, v = (store(layer)[slots].repeat_interleave(group, 2).transpose(1, 2) for store in (pool.keys, pool.values))
        return F.scaled_dot_product_attention(q_TNH[:, :, None], k, v, attn_mask=mask, scale=spec.scale)[:, :, 0]

    def padded(layer: int) -> Tensor:
        k, v = (store(layer)[slots].transpose(1, 2) for store in (pool.keys, pool.values))
        q = q_TNH.view(batch_size, spec.num_kv_heads, group, spec.head_size)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale).reshape(q_TNH.shape)

    yield "naive", naive
    yield "padded", padded
    for name, table, cached_bytes, padding in (
        ("one by one in place", pages, 1 << 28, 0.0),
        ("one by one copied", shuffled, 0, 0.0),
        ("callboard, neighbours", pages, backend.CACHED_BYTES, backend.PADDING),
        ("callboard, shuffled", shuffled, backend.CACHED_BYTES, backend.PADDING),
    ):
        yield name, prepared(spec, pool, q_TNH, table, length, cached_bytes, padding)


def prepared(
    spec: AttentionSpec,
    pool: KVPool,
    q_TNH: Tensor,
    table: npt.NDArray[np.int32],
    length: int,
    cached_bytes: int,
    padding: float,
) -> Way:
    """The backend after ``begin`` with these limits; 0 padding means no groups."""
    attention = TorchAttention(spec, pool)
    lengths, ones = np.full(len(table), length, np.int32), np.ones(len(table), np.int32)
    usual = backend.CACHED_BYTES, backend.PADDING
    backend.CACHED_BYTES, backend.PADDING = cached_bytes, padding
    attention.begin(
        AttentionBatch(
            num_decodes=len(table),
            page_table_BP=torch.from_numpy(table),
            lengths_B=torch.from_numpy(lengths),
            query_starts_B1=torch.arange(len(table) + 1, dtype=torch.int32),
            host_lengths=lengths,
            host_query_lengths=ones,
        )
    )
    backend.CACHED_BYTES, backend.PADDING = usual
    return lambda layer: attention.attend(layer, q_TNH)


def measure(heads: str, batch_size: int, length: int) -> dict[str, float]:
    """Median seconds per layer of each way."""
    num_heads, num_kv_heads, head_size = HEADS[heads]
    spec = AttentionSpec(NUM_LAYERS, num_heads, num_kv_heads, head_size, head_size**-0.5)
    num_pages = batch_size * length // PAGE_SIZE
    pool = KVPool(NUM_LAYERS, num_pages, PAGE_SIZE, num_kv_heads, head_size, torch.float32, torch.device("cpu"))
    pool.data.normal_()
    candidates = dict(ways(spec, pool, torch.randn(batch_size, num_heads, head_size), batch_size, length))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(NUM_TURNS):
        for name, attend in candidates.items():
            start = time.perf_counter()
            for layer in range(NUM_LAYERS):
                attend(layer)
            seconds[name].append((time.perf_counter() - start) / NUM_LAYERS)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 for all cores")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024], help="multiples of 16")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = []
    table: Table | None = None
    with torch.inference_mode():
        for heads in HEADS:
            for batch_size in arguments.batches:
                for length in arguments.lengths:
                    seconds = measure(heads, batch_size, length)
                    results.append({"heads": heads, "batch": batch_size, "length": length, "seconds": seconds})
                    if table is None:
                        title = f"decode attention, microseconds per layer, {torch.get_num_threads()} torch threads"
                        table = Table("heads", "batch", "length", *seconds, title=title)
                    table.add_row(
                        heads, str(batch_size), str(length), *(f"{one * 1e6:.0f}" for one in seconds.values())
                    )
    if table is not None:
        Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
