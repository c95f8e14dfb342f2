"""The triton attention backend on the device: right in every case of the conformance kit, eager and replayed.

On a CPU it needs TRITON_INTERPRET=1, and takes a few small cases.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import callboard_attention_backend
from engine.plugins.declaration import read_declaration
from engine.plugins.proof.attention import check_case
from engine.plugins.proof.reference import attend
from engine.plugins.support.paging import batch_on
from engine.plugins.testing.attention import through_hook
from engine.plugins.testing.attention_cases import attention_cases
from engine.types.errors import PluginError
from gpu_sections.rows import Row, captured, skipped

SECONDS = 40.0  # for the kit: every case compiles kernels of its own
SPEC = AttentionSpec(2, 16, 8, 128, 128**-0.5, window=100, first_window_layer=1)
PAGE_SIZE, MAX_PAGES = 16, 64
BOUND = 2e-2


def cannot_run(device: torch.device) -> list[Row]:
    """The row that says why, or none."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    return [skipped("needs a GPU, or TRITON_INTERPRET=1")]


def section(
    device: torch.device,
    kit: Sequence[str] = (),
    replays: Sequence[tuple[int, int]] = ((8, 1000), (3, 40), (1, 1)),
    repeats: tuple[int, int, int] = (2000, 1000, 8),
) -> Iterator[Row]:
    """A row per case of the kit, in bfloat16 and float16 too; then replays of one captured decode step.

    kit: names of cases; empty for all.  replays: (rows, longest context).  repeats: of a step with the same rows, their
    longest context, and KV heads."""
    if rows := cannot_run(device):
        yield from rows
        return
    declares = read_declaration("engine.plugins.attention.triton")
    assert declares is not None
    cases = [case for case in attention_cases(declares) if not kit or case.name in kit]
    # Tensor cores multiply 16-bit numbers only: the kit's usual float32 takes other instructions.
    halves = [replace(case, dtype="bfloat16") for case in cases if case.dtype == "float32" and not case.contiguous]
    factory = through_hook(callboard_attention_backend)
    deadline, left_out = time.perf_counter() + SECONDS, 0
    for case in (*halves, *cases):
        if time.perf_counter() > deadline:
            left_out += 1
            continue
        try:
            check_case(case, factory, device.type)
        except (AssertionError, PluginError) as error:
            yield {"case": str(case), "ok": False, "problem": str(error)[:300]}
        else:
            yield {"case": str(case), "ok": True}
    if left_out:
        yield {"case": f"{left_out} more cases", "ok": True, "problem": f"left out: {SECONDS:g} s were over"}
    yield from _replayed(device, replays)
    yield _repeated(device, *repeats)


def _repeated(device: torch.device, repeats: int, longest: int, heads: int) -> Row:
    """The row of a step whose rows are divided: the same bits in every replay, whichever program is the last."""
    spec = AttentionSpec(1, 2 * heads, heads, 128, 128**-0.5)
    pool = KVPool(1, 3 * MAX_PAGES, PAGE_SIZE, heads, 128, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(1)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    backend = through_hook(callboard_attention_backend)(spec, pool)
    table_BP = np.random.default_rng(1).permutation(3 * MAX_PAGES).astype(np.int32).reshape(3, MAX_PAGES)
    backend.plan_step(
        batch_on(device, 3, table_BP, np.array([longest, 7, longest // 3], np.int32), np.ones(3, np.int32))
    )
    q_TNH = torch.randn((3, 2 * heads, 128), generator=generator).to(device, torch.bfloat16)
    expected = backend.attend(0, q_TNH).clone()
    replay, (out_TNH,) = captured(lambda: [backend.attend(0, q_TNH)], device)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(repeats):
        replay()
        differing += (out_TNH != expected).any()
    count = int(differing)
    problem = f"other bits in {count} of them" if count else ""
    return {"case": f"{repeats} replays of rows that are divided", "ok": not count, "problem": problem}


def _replayed(device: torch.device, replays: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """One capture of 8 rows for steps of other lengths, pages and numbers of rows, each against the definition."""
    num_rows = 8
    pool = KVPool(SPEC.num_layers, num_rows * MAX_PAGES, PAGE_SIZE, 8, 128, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(0)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    backend = through_hook(callboard_attention_backend)(SPEC, pool)
    batch = AttentionBatch(
        num_decodes=num_rows,
        page_table_BP=torch.full((num_rows, MAX_PAGES), pool.dump_page, dtype=torch.int32, device=device),
        lengths_B=torch.zeros(num_rows, dtype=torch.int32, device=device),
        query_starts_B1=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        host_lengths=np.zeros(num_rows, dtype=np.int32),
        host_query_lengths=np.ones(num_rows, dtype=np.int32),
    )
    q_TNH = torch.zeros((num_rows, 16, 128), dtype=torch.bfloat16, device=device)
    backend.plan_step(batch)
    layers = range(SPEC.num_layers)
    for layer in layers:
        backend.attend(layer, q_TNH)  # compiles its kernels
    replay, outs = captured(lambda: [backend.attend(layer, q_TNH) for layer in layers], device)
    for rows, longest in replays:
        lengths_B = torch.randint(1, longest + 1, (rows,), generator=generator)
        table_BP = torch.randperm(pool.num_pages, generator=generator).view(num_rows, MAX_PAGES)
        batch.lengths_B.zero_()
        batch.lengths_B[:rows] = lengths_B.to(device, torch.int32)
        batch.page_table_BP.copy_(table_BP)
        q_TNH.copy_(torch.randn(q_TNH.shape, generator=generator))
        replay()
        error = 0.0
        for row, length in enumerate(lengths_B.tolist()):
            position_L = torch.arange(length)
            slots_L = (table_BP[row, position_L // PAGE_SIZE] * PAGE_SIZE + position_L % PAGE_SIZE).to(device)
            for layer, out_TNH in enumerate(outs):
                keys, values = pool.keys(layer)[slots_L], pool.values(layer)[slots_L]
                expected = attend(q_TNH[row][None], keys, values, SPEC.scale, SPEC.window if layer else 0)
                error = max(error, float((out_TNH[row].double().cpu() - expected[0]).abs().max()))
        padding = max(float(out_TNH[rows:].abs().max()) for out_TNH in outs) if rows < num_rows else 0.0
        ok = error <= BOUND and padding == 0
        yield {"case": f"replay for {rows} of {num_rows} rows up to {longest}", "ok": ok, "error": error}
