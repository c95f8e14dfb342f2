"""Tuning: measures each candidate for each size, before the first request and never after.

Legend: B sequences · P page-table width · T queries · N query heads · H head size
Owns: the sample batches for each size.  Does not know: the storage of results (``tuning.py``).
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import triton

from engine.host.contest import Contest
from engine.layers.attention import AttentionBatch
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.tiles import (
    INTERPRETED,
    DecodeTiles,
    PrefillTiles,
    decode_candidates,
    prefill_candidates,
)
from engine.plugins.attention.triton.tuning import TileTable, kept_table, size_key
from engine.plugins.support.paging import batch_on

log = logging.getLogger(__name__)

BATCH_SIZES = (1, 4, 16, 64, 256)
CONTEXTS = (1024, 4096, 16384)
MAX_QUERIES = 4096
MAX_LAYERS = 32  # in sequence, so that keys are read from memory and not from the cache, as in a step

Tiles = TypeVar("Tiles", DecodeTiles, PrefillTiles)
Measure = Callable[[Callable[[], None]], float]


def use_known(attention: TritonAttention) -> None:
    """Give ``attention`` the tiles that an earlier ``tune`` found on this machine, if any."""
    if attention.processors.name == INTERPRETED:
        return
    table = kept_table(attention.processors.name).load() or TileTable()
    with torch.inference_mode():
        _compile(attention, table)
    attention.tuned = table
    known = sum(key.startswith(f"{attention.shape} ") for key in (*table.decode, *table.prefill))
    log.info("attention.triton: tiles of %d sizes known from before; option tune=true measures the missing ones", known)


def tune(
    attention: TritonAttention,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    contexts: Sequence[int] = CONTEXTS,
    measure: Measure | None = None,
) -> TileTable:
    """Give ``attention`` the fastest tiles for these sizes: from the file, or measured and written there.

    measure: returns the milliseconds of work; by default in a captured graph.  Sizes beyond the pool are skipped.
    """
    if attention.processors.name == INTERPRETED and measure is None:
        log.info("attention.triton: the interpreter is not tuned")
        return TileTable()
    start = time.perf_counter()
    kept = kept_table(attention.processors.name)
    table = kept.load() or TileTable()
    known = len(table.decode) + len(table.prefill)
    spec, itemsize = attention.spec, attention.pool.dtype.itemsize
    decodes = decode_candidates(spec.head_size, itemsize, attention.processors, not attention.pool.format.plain)
    prefills = prefill_candidates(spec.head_size, itemsize, attention.processors)
    with torch.inference_mode():
        for context in contexts:
            if context > attention.pool.num_pages * attention.pool.page_size:
                continue
            for batch_size in batch_sizes:
                key = size_key(attention.shape, batch_size, context)
                if key not in table.decode:
                    batch = _decode_batch(attention, batch_size, context)
                    _keep_fastest(attention, batch, decodes, table.decode, key, measure or _milliseconds)
            key = size_key(attention.shape, 1, context)
            if key not in table.prefill:
                batch = _prefill_batch(attention, context)
                _keep_fastest(attention, batch, prefills, table.prefill, key, measure or _milliseconds)
        _compile(attention, table)
        attention.tuned = table
    measured = len(table.decode) + len(table.prefill) - known
    if measured:
        kept.keep(table)
    log.info(
        "attention.triton: tiles of %d sizes measured, %d known before, %.1f s",
        measured,
        known,
        time.perf_counter() - start,
    )
    return table


def _keep_fastest(
    attention: TritonAttention,
    batch: AttentionBatch,
    candidates: Sequence[Tiles],
    fastest: dict[str, Tiles],
    key: str,
    measure: Measure,
) -> None:
    """Write the best of the candidates to fastest[key]; one that cannot run is out, and so is a size if none can."""

    def milliseconds(tiles: Tiles, size: str) -> float:
        try:
            return measure(_work(attention, batch, tiles))
        except Exception as error:  # too much shared memory, no memory for the trial: the others may do
            log.info("attention.triton: %s: %s is out: %s", size, tiles, _short(error))
            return math.inf

    times = {tiles: took for tiles, (took,) in Contest(milliseconds, (key,), turns=1).run(candidates).items()}
    if any(took < math.inf for took in times.values()):
        fastest[key] = min(times, key=lambda tiles: times[tiles])
        log.info("attention.triton: %s: %s, %.3f ms", key, fastest[key], times[fastest[key]])


def _work(attention: TritonAttention, batch: AttentionBatch, tiles: DecodeTiles | PrefillTiles) -> Callable[[], None]:
    """Return a function that runs some layers of attention with these tiles."""
    spec, pool = attention.spec, attention.pool
    num_queries = int(batch.host_query_lengths.sum())
    q_TNH = torch.zeros((num_queries, spec.num_heads, spec.head_size), dtype=pool.dtype, device=pool.data.device)
    layers = [layer for layer in range(spec.num_layers) if spec.window_of(layer) == spec.window]

    def work() -> None:
        attention.plan_step(batch, tiles)
        for layer in layers[:MAX_LAYERS]:
            attention.attend(layer, q_TNH)

    return work


def _compile(attention: TritonAttention, table: TileTable) -> None:
    """Run all tiles of this shape once, so that nothing is compiled in a step; those that fail are dropped."""
    _try_each(attention, _decode_batch(attention, 1, 1), table.decode)
    _try_each(attention, _prefill_batch(attention, 1), table.prefill)


def _try_each(attention: TritonAttention, batch: AttentionBatch, table: dict[str, Tiles]) -> None:
    mine = {key: tiles for key, tiles in table.items() if key.startswith(f"{attention.shape} ")}
    for tiles in dict.fromkeys(mine.values()):
        try:
            _work(attention, batch, tiles)()
        except Exception as error:  # the file may come from another machine
            log.warning("attention.triton: %s cannot be used: %s", tiles, _short(error))
            for key in [key for key, value in mine.items() if value == tiles]:
                del table[key]


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _decode_batch(attention: TritonAttention, batch_size: int, context: int) -> AttentionBatch:
    """Return decode rows with lengths from a quarter of the context to all of it."""
    lengths = np.linspace(context, max(1, context // 4), batch_size).astype(np.int32)
    return _batch(attention, np.random.default_rng(0).permutation(lengths), np.ones(batch_size, np.int32), batch_size)


def _prefill_batch(attention: TritonAttention, context: int) -> AttentionBatch:
    """Return one prompt, or its last part."""
    return _batch(attention, np.array([context], np.int32), np.array([min(context, MAX_QUERIES)], np.int32), 0)


def _batch(
    attention: TritonAttention, lengths: np.ndarray, query_lengths: np.ndarray, num_decodes: int
) -> AttentionBatch:
    """Return a batch over random pages of the pool; their contents do not matter."""
    pool = attention.pool
    shape = (len(lengths), -(-int(lengths.max()) // pool.page_size))
    table_BP = np.random.default_rng(0).integers(0, max(1, pool.num_pages), shape, dtype=np.int32)
    return batch_on(pool.data.device, num_decodes, table_BP, lengths, query_lengths)


def _milliseconds(work: Callable[[], None]) -> float:
    """Return the time of work in a graph: launching from Python takes longer than most of the work."""
    return float(triton.testing.do_bench_cudagraph(work, rep=20, return_mode="median"))
