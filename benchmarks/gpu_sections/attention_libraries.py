"""FlashInfer and FlashAttention through the conformance kit, captured in a graph, and timed beside the torch backend.

Everything is bfloat16 with heads of 128: what these libraries are used for, and what they have kernels for without
compiling any for minutes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch

from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBatch, AttentionFactory, AttentionSpec
from engine.plugins.attention import flash_attn as flash_attn_plugin
from engine.plugins.attention import flashinfer as flashinfer_plugin
from engine.plugins.attention.flashinfer.append import PagedAppend
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.declaration import convert_declaration
from engine.plugins.testing.attention import check_case, through_hook
from engine.plugins.testing.attention_cases import attention_cases
from gpu_sections.rows import Row, seconds_of

DTYPE, HEAD_SIZE, HEADS, KV_HEADS = torch.bfloat16, 128, 16, 8
BOUND = 2e-2
ROWS, CONTEXT = 64, 1024


def flashinfer(device: torch.device) -> Iterator[Row]:
    """Its kernels of every kind, and its store."""
    for options in ({}, {"tensor_cores": "always"}, {"prefill_backend": "fa2"}):
        name = " ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
        factory = through_hook(flashinfer_plugin.callboard_attention_backend, options)
        yield from _library(flashinfer_plugin, name, factory, 16, device, (_kit, _captured, _decode))
    yield _store(device)
    # Last, as kernels with a window may have to be compiled first, for longer than a section may take.
    factory = through_hook(flashinfer_plugin.callboard_attention_backend)
    yield from _library(flashinfer_plugin, "defaults", factory, 16, device, (_windows,))


def flash_attn(device: torch.device) -> Iterator[Row]:
    """FA3 and FA2, with the pages that each takes."""
    for implementation, page_size in (("fa3", 16), ("fa2", 256)):
        options = {"implementation": implementation}
        factory = through_hook(flash_attn_plugin.callboard_attention_backend, options)
        checks = (_kit, _captured, _decode, _windows)
        yield from _library(flash_attn_plugin, implementation, factory, page_size, device, checks)


def _library(
    plugin: ModuleType,
    name: str,
    factory: AttentionFactory,
    page_size: int,
    device: torch.device,
    checks: tuple[Callable[..., Iterator[Row]], ...],
) -> Iterator[Row]:
    """One library in one setting.  A failure is a row, and the next check is made."""
    for check in checks:
        try:
            yield from check(plugin, name, factory, page_size, device)
        except Exception as error:  # whatever a library raises
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield {"case": f"{name}, {check.__name__.strip('_')}", "ok": False, "problem": problem}


def _kit(
    plugin: ModuleType, name: str, factory: AttentionFactory, page_size: int, device: torch.device
) -> Iterator[Row]:
    yield _kit_row(f"{name}, kit", plugin, factory, page_size, device, windows=False)


def _windows(
    plugin: ModuleType, name: str, factory: AttentionFactory, page_size: int, device: torch.device
) -> Iterator[Row]:
    yield _kit_row(f"{name}, kit with windows", plugin, factory, page_size, device, windows=True)


def _kit_row(
    name: str, plugin: ModuleType, factory: AttentionFactory, page_size: int, device: torch.device, windows: bool
) -> Row:
    declared = convert_declaration(plugin.__name__, plugin.CALLBOARD_PLUGIN)
    cases = {
        replace(case, dtype="bfloat16", head_size=HEAD_SIZE, page_size=page_size)
        for case in attention_cases(declared)
        if bool(case.window) == windows
    }
    failed = []
    for case in sorted(cases, key=str):
        try:
            check_case(case, factory, device.type)
        except Exception as error:  # the rest of the cases say what is special about this one
            failed.append(f"{case}: {' '.join(str(error).split())[:200]}")
    row = {"case": f"{name}, {len(cases)} cases", "ok": not failed, "error": len(failed)}
    return {**row, "problem": failed[0]} if failed else row


def _captured(
    plugin: ModuleType, name: str, factory: AttentionFactory, page_size: int, device: torch.device
) -> Iterator[Row]:
    """A graph of decode rows, replayed with lengths that grow over pages and with fewer rows than it has."""
    spec, pool = _spec_and_pool(page_size, device)
    graph_backend = factory(spec, pool).for_graph(ROWS, CONTEXT // page_size)
    eager = TorchAttention(spec, pool)
    q_RNH = torch.randn((ROWS, HEADS, HEAD_SIZE), device=device).to(DTYPE)
    graph_backend.begin(_rows(pool, np.full(ROWS, 1), device))
    graph_backend.attend(0, q_RNH)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_RNH = graph_backend.attend(0, q_RNH)
    worst = 0.0
    for count, longest in ((ROWS, 5), (ROWS, 6), (ROWS, CONTEXT), (3, CONTEXT), (ROWS, page_size), (1, 1)):
        lengths = np.random.default_rng(longest).integers(1, longest, count, endpoint=True)
        batch = _rows(pool, lengths, device)
        graph_backend.begin(batch)
        graph.replay()
        eager.begin(batch)
        expected = eager.attend(0, q_RNH[:count])
        worst = max(worst, (out_RNH[:count].float() - expected.float()).abs().max().item())
    yield {"case": f"{name}, captured", "ok": worst <= BOUND, "error": worst}


def _decode(
    plugin: ModuleType, name: str, factory: AttentionFactory, page_size: int, device: torch.device
) -> Iterator[Row]:
    """A layer of decode rows: microseconds, bandwidth, and beside torch in the same run."""
    spec, pool = _spec_and_pool(page_size, device)
    q_RNH = torch.randn((ROWS, HEADS, HEAD_SIZE), device=device).to(DTYPE)
    batch = _rows(pool, np.full(ROWS, CONTEXT), device)
    outs, seconds = [], []
    for backend in (factory(spec, pool), TorchAttention(spec, pool)):
        backend.begin(batch)
        outs.append(backend.attend(0, q_RNH).float())
        seconds.append(seconds_of(lambda backend=backend: backend.attend(0, q_RNH), device))
    error = (outs[0] - outs[1]).abs().max().item()
    num_bytes = 2 * ROWS * CONTEXT * KV_HEADS * HEAD_SIZE * DTYPE.itemsize
    row = {"case": f"{name}, {ROWS} rows of {CONTEXT}", "ok": error <= BOUND, "error": error, "us": seconds[0] * 1e6}
    yield {**row, "gb_per_s": num_bytes / seconds[0] / 1e9, "of_plain": seconds[1] / seconds[0]}


def _store(device: torch.device) -> Row:
    """``append_paged_kv_cache`` against torch's own way to write the pool."""
    import flashinfer as library

    _, pool = _spec_and_pool(16, device)
    slots_T = torch.randperm(pool.num_pages * 16, device=device)[:512]
    heads = torch.randn((512, HEADS + 2 * KV_HEADS, HEAD_SIZE), device=device).to(DTYPE)
    k_TGH, v_TGH = heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
    before = pool.data.clone()
    pool.store(0, k_TGH, v_TGH, slots_T)
    plain = seconds_of(lambda: pool.store(0, k_TGH, v_TGH, slots_T), device)
    expected = pool.data.clone()
    pool.data.copy_(before)
    append = PagedAppend(library, pool)
    append(0, k_TGH, v_TGH, slots_T)
    differing = int((pool.data != expected).sum())
    seconds = seconds_of(lambda: append(0, k_TGH, v_TGH, slots_T), device)
    row = {"case": "store of 512 tokens", "ok": differing == 0, "error": differing, "us": seconds * 1e6}
    return {**row, "of_plain": plain / seconds}


def _spec_and_pool(page_size: int, device: torch.device) -> tuple[AttentionSpec, KVPool]:
    spec = AttentionSpec(1, HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
    pool = KVPool(1, ROWS * CONTEXT // page_size, page_size, KV_HEADS, HEAD_SIZE, DTYPE, device)
    pool.data[:, :, : pool.num_pages].normal_()
    return spec, pool


def _rows(pool: KVPool, lengths: np.ndarray, device: torch.device) -> AttentionBatch:
    """Decode rows over shuffled pages."""
    host = lengths.astype(np.int32)
    per_row = pool.num_pages // ROWS
    table = torch.randperm(pool.num_pages).view(ROWS, per_row)[: len(host)].to(torch.int32)
    return AttentionBatch(
        num_decodes=len(host),
        page_table_BP=table.to(device),
        lengths_B=torch.from_numpy(host).to(device),
        query_starts_B1=torch.arange(len(host) + 1, dtype=torch.int32, device=device),
        host_lengths=host,
        host_query_lengths=np.ones(len(host), dtype=np.int32),
    )
