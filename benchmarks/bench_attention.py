"""How should decode attention on a CPU read a paged pool: in place, copied, page by page, or as one padded batch?

All ways compute the same thing, which is checked, in turns, over several layers of a pool larger than the caches.
Numbers are relative to the naive way: copy everybody's keys and values, repeat them for every query head, attend.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --threads 1 2 --batches 1 8 32 --lengths 512
    python benchmarks/bench_attention.py --no-flex              # on a machine without a C++ compiler
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention import torch as backend
from engine.plugins.attention.torch import TorchAttention

# name: query heads, KV heads, head size
HEADS = {"qwen3-0.6b": (16, 8, 128), "demo": (4, 2, 64)}
PAGE_SIZE = 16
NUM_LAYERS = 4
NUM_TURNS = 21

Way = Callable[[int], Tensor]


def ways(
    spec: AttentionSpec, pool: KVPool, q_TNH: Tensor, batch_size: int, length: int, with_flex: bool
) -> Iterator[tuple[str, Way]]:
    """(name, attention of one layer), over shuffled pages unless the name says that they lie side by side.

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
    yield "page by page", by_pages(spec, pool, q_TNH, shuffled)
    if with_flex:
        yield "flex", flex(spec, pool, q_TNH, shuffled)
    for name, table, cached_bytes, padding in (
        ("views, side by side", pages, 1 << 28, 0.0),
        ("one by one copied", shuffled, 0, 0.0),
        ("callboard, side by side", pages, backend.CACHED_BYTES, backend.PADDING),
        ("callboard", shuffled, backend.CACHED_BYTES, backend.PADDING),
    ):
        yield name, prepared(spec, pool, q_TNH, table, length, cached_bytes, padding)


def by_pages(spec: AttentionSpec, pool: KVPool, q_TNH: Tensor, table: npt.NDArray[np.int32]) -> Way:
    """One page of every sequence at a time, with a running softmax: only a page each is copied."""
    batch_size, _, head_size = q_TNH.shape
    shape = (-1, PAGE_SIZE, spec.num_kv_heads, spec.head_size)
    pages_PB = torch.from_numpy(np.ascontiguousarray(table.T))
    q_BGnH = q_TNH.view(batch_size, spec.num_kv_heads, -1, head_size) * spec.scale
    copies = [pool.data.new_empty(batch_size, *shape[1:]) for _ in range(2)]

    def attend(layer: int) -> Tensor:
        out, total = torch.zeros_like(q_BGnH), q_BGnH.new_zeros(*q_BGnH.shape[:3], 1)
        largest = torch.full_like(total, -torch.inf)
        for page_B in pages_PB:
            for store, copy in zip((pool.keys, pool.values), copies, strict=True):
                torch.index_select(store(layer).view(shape), 0, page_B, out=copy)
            scores = q_BGnH @ copies[0].permute(0, 2, 3, 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrink, weights = (largest - new).exp_(), (scores - new).exp_()
            out.mul_(shrink).add_(weights @ copies[1].transpose(1, 2))
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            largest = new
        return (out / total).view(q_TNH.shape)

    return attend


def flex(spec: AttentionSpec, pool: KVPool, q_TNH: Tensor, table: npt.NDArray[np.int32]) -> Way:
    """torch's flex_attention, compiled to C++ for exactly this shape; it reads the pages where they are."""
    batch_size, num_pages = table.shape
    in_pool = len(pool.keys(0)) // PAGE_SIZE
    pages = torch.zeros(batch_size, 1, 1, in_pool, dtype=torch.int32)
    pages[:, 0, 0, :num_pages] = torch.from_numpy(table)
    counts = torch.full((batch_size, 1, 1), num_pages, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(pages),
        counts,
        pages,
        BLOCK_SIZE=(128, PAGE_SIZE),
        seq_lengths=(1, in_pool * PAGE_SIZE),
        compute_q_blocks=False,
    )
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    q_BN1H = q_TNH[:, :, None]

    def attend(layer: int) -> Tensor:
        k, v = (store(layer).transpose(0, 1)[None] for store in (pool.keys, pool.values))
        return compiled(q_BN1H, k, v, block_mask=mask, scale=spec.scale, enable_gqa=True)[:, :, 0]

    attend(0)  # compiles
    return attend


def prepared(
    spec: AttentionSpec,
    pool: KVPool,
    q_TNH: Tensor,
    table: npt.NDArray[np.int32],
    length: int,
    cached_bytes: int,
    padding: float,
) -> Way:
    """The backend after ``plan_step`` with these limits; 0 padding means no groups."""
    attention = TorchAttention(spec, pool)
    lengths, ones = np.full(len(table), length, np.int32), np.ones(len(table), np.int32)
    usual = backend.CACHED_BYTES, backend.PADDING
    backend.CACHED_BYTES, backend.PADDING = cached_bytes, padding
    attention.plan_step(
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


def measure(heads: str, batch_size: int, length: int, with_flex: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds per layer of each way, and the median over turns of how many times faster than naive it is.

    A turn's times are divided by each other, so that a machine that is busy for a while slows all ways alike.
    """
    num_heads, num_kv_heads, head_size = HEADS[heads]
    spec = AttentionSpec(NUM_LAYERS, num_heads, num_kv_heads, head_size, head_size**-0.5)
    num_pages = batch_size * length // PAGE_SIZE
    pool = KVPool(NUM_LAYERS, num_pages, PAGE_SIZE, num_kv_heads, head_size, torch.float32, torch.device("cpu"))
    pool.data.normal_()
    q_TNH = torch.randn(batch_size, num_heads, head_size)
    candidates = dict(ways(spec, pool, q_TNH, batch_size, length, with_flex))
    for name, attend in candidates.items():
        if "side by side" not in name:  # those read other pages than the rest
            torch.testing.assert_close(attend(1), candidates["naive"](1), msg=f"{name} is wrong")
    torch.testing.assert_close(
        candidates["views, side by side"](1), candidates["callboard, side by side"](1), msg="views are wrong"
    )
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(NUM_TURNS):
        for name, attend in candidates.items():
            start = time.perf_counter()
            for layer in range(NUM_LAYERS):
                attend(layer)
            seconds[name].append((time.perf_counter() - start) / NUM_LAYERS)
    faster = {
        name: statistics.median(base / one for base, one in zip(seconds["naive"], values, strict=True))
        for name, values in seconds.items()
    }
    return {name: statistics.median(values) for name, values in seconds.items()}, faster


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()], help="torch threads")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024], help="multiples of 16")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True, help="compiles for each case")
    arguments = parser.parse_args()
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rows = []
        for heads, batch_size, length in product(HEADS, arguments.batches, arguments.lengths):
            with torch.inference_mode():
                seconds, faster = measure(heads, batch_size, length, arguments.flex)
            case = {"heads": heads, "batch": batch_size, "length": length, "threads": threads}
            microseconds = {name: round(one * 1e6, 1) for name, one in seconds.items()}
            ratios = {name: round(one, 2) for name, one in faster.items()}
            results.append({**case, "us_per_layer": microseconds, "times_faster_than_naive": ratios})
            rows.append((heads, batch_size, length, f"{seconds['naive'] * 1e6:.0f}", *list(ratios.values())[1:]))
        title = f"decode attention, times faster than naive, {threads} torch threads"
        names = [name for name in ratios if name != "naive"]
        table = Table("heads", "batch", "length", "naive us", *names, title=title, padding=(0, 0))
        for row in rows:
            table.add_row(*map(str, row))
        Console().print(table)
        keep(arguments.output, {"results": results})


if __name__ == "__main__":
    main()
