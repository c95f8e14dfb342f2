"""FlashInfer, XQA and FlashAttention through the conformance kit, captured in a graph, and timed beside torch's own.

Everything is bfloat16 with heads of 128: what these libraries are used for, and what they have kernels for without
compiling any for minutes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from engine.layers.attention import AttentionBatch, AttentionFactory, AttentionSpec, GraphAttentionBuilder
from engine.layers.kv_pool import KVPool
from engine.plugins.attention import flash_attn as flash_attn_plugin
from engine.plugins.attention import flash_mla as flash_mla_plugin
from engine.plugins.attention import flashinfer as flashinfer_plugin
from engine.plugins.attention import xqa as xqa_plugin
from engine.plugins.attention.flashinfer.kernels import PagedAppend
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.declaration import convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.proof.attention import check_case
from engine.plugins.testing.attention import through_hook
from engine.plugins.testing.attention_cases import attention_cases
from gpu_sections.rows import Row, captured, seconds_of, skipped

DTYPE, HEAD_SIZE, HEADS, KV_HEADS = torch.bfloat16, 128, 16, 8
BOUND, ROUNDED_BOUND = 2e-2, 0.15


@dataclass(frozen=True)
class Library:
    """One library in one setting.  rows, context: of its timed step.  kit: how many of its cases; None for all.
    kv_dtype: what pages keep, '' for the queries' type.  bound: of a result's error."""

    plugin: ModuleType
    name: str
    factory: AttentionFactory
    page_size: int
    device: torch.device
    rows: int = 64
    context: int = 1024
    kit: int | None = None
    kv_dtype: str = ""
    bound: float = BOUND


def flashinfer(device: torch.device, **sizes: Any) -> Iterator[Row]:
    """Yield rows of FlashInfer's kernels of every kind, and of its store.  sizes: see ``Library``."""
    if rows := cannot_run(flashinfer_plugin, device):
        yield from rows
        return
    for options in ({}, {"tensor_cores": "always"}, {"prefill_backend": "fa2"}):
        name = " ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
        factory = through_hook(flashinfer_plugin.callboard_attention_backend, options)
        library = Library(flashinfer_plugin, name, factory, 16, device, **sizes)
        yield from _checked(library, (_captured, _decode, _kit))
    library = Library(
        flashinfer_plugin, "defaults", through_hook(flashinfer_plugin.callboard_attention_backend), 16, device, **sizes
    )
    # Windows last, as kernels with one may have to be compiled first, for longer than a section may take.
    yield from _checked(library, (_store, _windows))


def flashinfer_fp8(device: torch.device, **sizes: Any) -> Iterator[Row]:
    """Yield rows of FlashInfer's kernels over pages of 8 bits, which it may compile first.  sizes: see ``Library``."""
    if rows := cannot_run(flashinfer_plugin, device):
        yield from rows
        return
    factory = through_hook(flashinfer_plugin.callboard_attention_backend)
    library = Library(flashinfer_plugin, "fp8 pages", factory, 16, device, **sizes, kv_dtype="fp8_e4m3")
    yield from _checked(library, (_captured, _decode, _beside_16_bits, _kit))


def flash_attn(device: torch.device, **sizes: Any) -> Iterator[Row]:
    """FA3 and FA2, with the pages that each takes.  sizes: see ``Library``."""
    if rows := cannot_run(flash_attn_plugin, device):
        yield from rows
        return
    for implementation, page_size in (("fa3", 16), ("fa2", 256)):
        options = {"implementation": implementation}
        factory = through_hook(flash_attn_plugin.callboard_attention_backend, options)
        library = Library(flash_attn_plugin, implementation, factory, page_size, device, **sizes)
        yield from _checked(library, (_captured, _decode, _kit, _windows))
    factory = through_hook(flash_attn_plugin.callboard_attention_backend, {"implementation": "fa3"})
    # Queries and weights are rounded to float8 as well.
    float8 = Library(
        flash_attn_plugin, "fa3 fp8 pages", factory, 16, device, **sizes, kv_dtype="fp8_e4m3", bound=ROUNDED_BOUND
    )
    yield from _checked(float8, (_captured, _decode, _beside_16_bits))


def xqa(device: torch.device, **sizes: Any) -> Iterator[Row]:
    """FlashInfer's XQA, with the pages that are prebuilt for it.  sizes: see ``Library``."""
    if rows := cannot_run(xqa_plugin, device):
        yield from rows
        return
    for page_size in (16, 64):
        factory = through_hook(xqa_plugin.callboard_attention_backend)
        library = Library(xqa_plugin, f"page {page_size}", factory, page_size, device, **sizes)
        yield from _checked(library, (_captured, _decode, _kit, _windows))


def flash_mla(device: torch.device, **sizes: Any) -> Iterator[Row]:
    """FlashMLA, or SGLang's build of it, over latents.  sizes: see ``Library``."""
    if rows := cannot_run(flash_mla_plugin, device):
        yield from rows
        return
    factory = through_hook(flash_mla_plugin.callboard_attention_backend)
    yield from _checked(Library(flash_mla_plugin, "latents", factory, 64, device, **sizes), (_kit,))


def cannot_run(plugin: ModuleType, device: torch.device) -> list[Row]:
    """The row that says why, by what the plugin declares to need; or none."""
    nothing_known = AttentionContext(
        device=device.type, dtype="", page_size=0, num_heads=0, num_kv_heads=0, head_size=0, window=0, phases=()
    )
    misfits = convert_declaration(plugin.__name__, plugin.CALLBOARD_PLUGIN).misfits(nothing_known)
    return [skipped("; ".join(misfits))] if misfits else []


def _checked(library: Library, checks: tuple[Callable[[Library], Row | Iterator[Row]], ...]) -> Iterator[Row]:
    """A failure is a row, and the next check is made."""
    for check in checks:
        try:
            found = check(library)
            for row in [found] if isinstance(found, dict) else found:
                yield {**row, "case": f"{library.name}, {row['case']}"}
        except Exception as error:  # whatever a library raises
            yield {"case": f"{library.name}, {check.__name__.strip('_')}", "ok": False, "problem": _told(error)}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _kit(library: Library) -> Iterator[Row]:
    return _kit_rows("kit", library, windows=False)


def _windows(library: Library) -> Iterator[Row]:
    return _kit_rows("kit with windows", library, windows=True)


def _kit_rows(name: str, library: Library, windows: bool) -> Iterator[Row]:
    """A row per case."""
    declared = convert_declaration(library.plugin.__name__, library.plugin.CALLBOARD_PLUGIN)
    cases = {
        replace(
            case,
            dtype="bfloat16",
            head_size=case.head_size if case.latent_size else HEAD_SIZE,
            page_size=library.page_size,
        )
        for case in attention_cases(declared)
        if bool(case.window) == windows and case.kv_dtype == library.kv_dtype
        if library.name != "fa2" or not (case.latent_size or case.sinks)  # which it refuses at the start
    }
    for case in sorted(cases, key=str)[: library.kit]:
        row: Row = {"case": f"{name}: {case}", "ok": True}
        try:
            check_case(case, library.factory, library.device.type)
        except Exception as error:  # the rest of the cases say what is special about this one
            row |= {"ok": False, "problem": _told(error)}
        yield row


def _captured(library: Library) -> Row:
    """A graph of decode rows, replayed with lengths that grow over pages and with fewer rows than it has."""
    rows, context, page_size, device = library.rows, library.context, library.page_size, library.device
    spec, pool = _spec_and_pool(library)
    backend, static = library.factory(spec, pool), _batch(pool, np.full(rows, 1), rows)
    plans = isinstance(backend, GraphAttentionBuilder)
    graph_backend = backend.for_graph(static) if isinstance(backend, GraphAttentionBuilder) else backend
    eager = TorchAttention(spec, pool)
    q_RNH = torch.randn((rows, HEADS, HEAD_SIZE), device=device).to(DTYPE)
    graph_backend.plan_step(static)
    graph_backend.attend(0, q_RNH)
    replay, (out_RNH,) = captured(lambda: [graph_backend.attend(0, q_RNH)], device)
    worst = 0.0
    for count, longest in ((rows, 5), (rows, 6), (rows, context), (min(3, rows), context), (rows, page_size), (1, 1)):
        lengths = np.random.default_rng(longest).integers(1, longest, count, endpoint=True)
        batch = _batch(pool, lengths, rows)
        padded = np.ones(rows, dtype=np.int32)
        padded[:count] = lengths
        if plans:
            graph_backend.plan_step(replace(static, host_lengths=padded))
        # As the captured step does it; padding has one token, of any page that is not NaN.
        static.page_table_BP[:count] = batch.page_table_BP
        static.lengths_B.copy_(torch.from_numpy(padded))
        replay()
        eager.plan_step(batch)
        expected = eager.attend(0, q_RNH[:count])
        worst = max(worst, (out_RNH[:count].float() - expected.float()).abs().max().item())
    return {"case": "captured", "ok": worst <= library.bound, "error": worst}


def _decode(library: Library) -> Row:
    """A layer of decode rows: microseconds, bandwidth, and beside torch in the same run."""
    rows, context, device = library.rows, library.context, library.device
    spec, pool = _spec_and_pool(library)
    q_RNH = torch.randn((rows, HEADS, HEAD_SIZE), device=device).to(DTYPE)
    batch = _batch(pool, np.full(rows, context), rows)
    outs, seconds = [], []
    for backend in (library.factory(spec, pool), TorchAttention(spec, pool)):
        backend.plan_step(batch)
        outs.append(backend.attend(0, q_RNH).float())
        seconds.append(seconds_of(lambda backend=backend: backend.attend(0, q_RNH), device))
    error = (outs[0] - outs[1]).abs().max().item()
    num_bytes = 2 * rows * context * KV_HEADS * HEAD_SIZE * pool.format.stored.itemsize
    row = {"case": f"{rows} rows of {context}", "ok": error <= library.bound, "error": error, "us": seconds[0] * 1e6}
    return {**row, "gb_per_s": num_bytes / seconds[0] / 1e9, "of_plain": seconds[1] / seconds[0]}


def _beside_16_bits(library: Library) -> Row:
    """A layer of decode rows over the library's pages and over bfloat16 ones: how many times as fast."""
    seconds = []
    for kv_dtype in (library.kv_dtype, ""):
        spec, pool = _spec_and_pool(replace(library, kv_dtype=kv_dtype))
        q_RNH = torch.randn((library.rows, HEADS, HEAD_SIZE), device=library.device).to(DTYPE)
        backend = library.factory(spec, pool)
        backend.plan_step(_batch(pool, np.full(library.rows, library.context), library.rows))
        seconds.append(seconds_of(lambda backend=backend, q=q_RNH: backend.attend(0, q), library.device))
    row = {"case": "beside bfloat16 pages", "ok": True, "us": seconds[0] * 1e6}
    return {**row, "of_plain": seconds[1] / seconds[0]}


def _store(library: Library) -> Row:
    """``append_paged_kv_cache`` against torch's own way to write the pool."""
    import flashinfer as package

    _, pool = _spec_and_pool(library)
    slots_T = torch.randperm(pool.num_pages * library.page_size, device=library.device)[:512]
    heads = torch.randn((len(slots_T), HEADS + 2 * KV_HEADS, HEAD_SIZE), device=library.device).to(DTYPE)
    k_TGH, v_TGH = heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
    before = pool.data.clone()
    pool.store(0, k_TGH, v_TGH, slots_T)
    plain = seconds_of(lambda: pool.store(0, k_TGH, v_TGH, slots_T), library.device)
    expected = pool.data.clone()
    pool.data.copy_(before)
    append = PagedAppend(package, pool)
    append(0, k_TGH, v_TGH, slots_T)
    differing = int((pool.data != expected).sum())
    seconds = seconds_of(lambda: append(0, k_TGH, v_TGH, slots_T), library.device)
    row = {"case": f"store of {len(slots_T)} tokens", "ok": differing == 0, "error": differing, "us": seconds * 1e6}
    return {**row, "of_plain": plain / seconds}


def _spec_and_pool(library: Library) -> tuple[AttentionSpec, KVPool]:
    page_size, num_pages = library.page_size, library.rows * -(-library.context // library.page_size)
    spec = AttentionSpec(1, HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
    pool = KVPool(1, num_pages, page_size, KV_HEADS, HEAD_SIZE, DTYPE, library.device, kv_dtype=library.kv_dtype)
    slots_T = torch.arange(num_pages * page_size, device=library.device)
    pool.store(0, *torch.randn((2, len(slots_T), KV_HEADS, HEAD_SIZE), device=library.device).to(DTYPE), slots_T)
    return spec, pool


def _batch(pool: KVPool, lengths: np.ndarray, num_rows: int) -> AttentionBatch:
    """Decode rows over shuffled pages.  num_rows: that share the pool."""
    host, device = lengths.astype(np.int32), pool.data.device
    table = torch.randperm(pool.num_pages).view(num_rows, -1)[: len(host)].to(torch.int32)
    return AttentionBatch(
        num_decodes=len(host),
        page_table_BP=table.to(device),
        lengths_B=torch.from_numpy(host).to(device),
        query_starts_B1=torch.arange(len(host) + 1, dtype=torch.int32, device=device),
        host_lengths=host,
        host_query_lengths=np.ones(len(host), dtype=np.int32),
    )
