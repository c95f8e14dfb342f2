"""The comparison of an attention backend with the definition of attention, in steps of random numbers.

Legend: T new tokens in the step · N query heads · G KV heads · H head size · L keys of a sequence
Owns: a pool with NaN wherever a backend must not read, the comparison with float64.
Does not know: which steps there are (``attention_cases.py``), kernels, plugins.
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionFactory,
    AttentionSpec,
    GraphAttentionBuilder,
    WritingAttention,
    is_capturable,
)
from engine.layers.kv_pool import KVPool
from engine.plugins.proof.attention_cases import AttentionCase, Sequence
from engine.plugins.proof.invariance import NAN_BYTE
from engine.plugins.proof.reference import attend
from engine.plugins.support.paging import batch_on, new_pool

NUM_LAYERS = 2
# A result may be off by the first plus the second times its size: a few roundings in the type.
TOLERANCES = {"float32": (1e-5, 1e-5), "float16": (1.5e-3, 2e-3), "bfloat16": (1e-2, 1.6e-2)}
# A score of 150 has a larger absolute rounding error than one of 5, by the same factor.
LOUD, LOUD_TOLERANCE = 40.0, 20.0
UNUSUAL_SCALE = 0.9  # differs from 1 / sqrt(H), which a backend may assume without reading the spec


def check_case(case: AttentionCase, factory: AttentionFactory, device: str = "cpu") -> None:
    """Run a backend through one case.  Raises AssertionError with the error and its place."""
    spec = AttentionSpec(
        num_layers=NUM_LAYERS,
        num_heads=case.num_kv_heads * case.ratio,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        scale=UNUSUAL_SCALE * case.head_size**-0.5,
        window=case.window,
        first_window_layer=case.first_window_layer,
        full_layers=case.full_layers,
        soft_cap=case.soft_cap,
        sinks=_sinks(case, torch.device(device)) if case.sinks else (),
        latent_size=case.latent_size,
        chunked=case.chunked,
    )
    check_steps(case, factory, spec, torch.device(device))


def _sinks(case: AttentionCase, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_LAYERS, case.num_kv_heads * case.ratio)
    return tuple(torch.randn(shape, generator=generator).to(device, getattr(torch, case.dtype)))


def check_steps(case: AttentionCase, factory: AttentionFactory, spec: AttentionSpec, device: torch.device) -> None:
    """Run a backend through one case with a given spec; at most two of its layers are used."""
    sizes = [sum(-(-length // case.page_size) for length, _ in (*rows, *segments)) for rows, segments in case.steps]
    few_layers, dtype = replace(spec, num_layers=min(NUM_LAYERS, spec.num_layers)), getattr(torch, case.dtype)
    pool = new_pool(few_layers, max(sizes) + 3, case.page_size, dtype, device, case.layout, case.kv_dtype)
    backend = factory(spec, pool)
    for method in ("plan_step", "attend"):
        assert callable(getattr(backend, method, None)), f"the backend has no method {method!r}"
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    for number, (rows, segments) in enumerate(case.steps):
        step = _ProofStep.draw(case, rows, segments, spec, pool, generator)
        try:
            _check_step(backend, step, spec, pool, case)
            if not segments and not case.num_padding:
                _check_captured(backend, step, spec, pool, case)
        except Exception as error:
            if len(case.steps) == 1:
                raise
            what = "" if isinstance(error, AssertionError) else f"raised {type(error).__name__}: "
            raise AssertionError(f"step {number}: {what}{error}") from error


@dataclass(frozen=True, slots=True)
class _ProofStep:
    """A batch, its queries, and for each sequence the slots of its keys and its number of queries."""

    batch: AttentionBatch
    q_TNH: Tensor
    slots: list[Tensor]
    num_padding: int

    @staticmethod
    def draw(
        case: AttentionCase,
        rows: tuple[Sequence, ...],
        segments: tuple[Sequence, ...],
        spec: AttentionSpec,
        pool: KVPool,
        generator: torch.Generator,
    ) -> "_ProofStep":
        """Return random keys, values and queries, in a pool that is NaN everywhere else.

        Page 0, which the unused entries of the page table name, is NaN too."""
        pool.by_page[: pool.num_pages].view(torch.uint8).fill_(NAN_BYTE)
        device, page_size = pool.data.device, pool.page_size
        padding = ((0, 1),) * (case.num_padding if not segments else 0)
        sequences = (*rows, *padding, *segments)
        counts = [-(-length // page_size) for length, _ in sequences]
        free = torch.arange(1, pool.num_pages)
        if not case.contiguous:
            free = free[torch.randperm(len(free), generator=generator)]
        table = np.zeros((len(sequences), max(counts) + 1), dtype=np.int32)
        slots = []
        for row, (length, _) in enumerate(sequences):
            pages, free = free[: counts[row]], free[counts[row] :]
            table[row, : counts[row]] = pages
            position_L = torch.arange(length)
            slots.append(pages[position_L // page_size] * pool.page_stride + position_L % page_size)
        all_slots = torch.cat(slots).to(device)
        for layer in range(min(NUM_LAYERS, spec.num_layers)):
            for records in (pool.keys(layer),) if spec.latent_size else (pool.keys(layer), pool.values(layer)):
                drawn = _normal((len(all_slots), spec.num_kv_heads, spec.head_size), pool, generator)
                records.view(pool.format.memory)[all_slots] = pool.format.encode(drawn)
        host_lengths = np.array([length for length, _ in sequences], dtype=np.int32)
        host_queries = np.array([count for _, count in sequences], dtype=np.int32)
        # The decoder passes the query part of a merged product, or a tensor of its own.
        wide = spec.num_heads + 2 * spec.num_kv_heads if case.strided else spec.num_heads
        q_TNH = _normal((int(host_queries.sum()), wide, spec.head_size), pool, generator)[:, : spec.num_heads]
        batch = batch_on(device, len(rows) + len(padding), table, host_lengths, host_queries)
        return _ProofStep(batch, q_TNH * LOUD if case.loud else q_TNH, slots, len(padding))


def _normal(shape: tuple[int, ...], pool: KVPool, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(pool.data.device, pool.dtype)


@torch.inference_mode()
def _check_step(
    backend: AttentionBackend, step: _ProofStep, spec: AttentionSpec, pool: KVPool, case: AttentionCase
) -> None:
    batch, q_TNH = step.batch, step.q_TNH
    inputs = {
        "the KV pool": pool.data,
        "the page table": batch.page_table_BP,
        "the lengths": batch.lengths_B,
        "the query starts": batch.query_starts_B1,
    }
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    backend.plan_step(batch)
    for layer in range(min(NUM_LAYERS, spec.num_layers)):
        out_TNH = backend.attend(layer, q_TNH)
        assert isinstance(out_TNH, Tensor), f"attend returned {type(out_TNH).__name__}, not a tensor"
        seen = (tuple(out_TNH.shape), out_TNH.dtype, out_TNH.device.type)
        expected = ((*q_TNH.shape[:2], spec.value_size), q_TNH.dtype, q_TNH.device.type)
        assert seen == expected, f"attend returned {seen}, it must be {expected}"
        if isinstance(backend, WritingAttention):
            written_TNH = torch.full_like(out_TNH, torch.nan)
            backend.attend_into(layer, q_TNH, written_TNH)
            assert torch.equal(written_TNH, out_TNH), "attend_into does not write what attend returns"
        # Before the comparison, which reads the same pool.
        for name, tensor in inputs.items():
            same = torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))  # bytes: NaN is not NaN
            assert same, f"the backend wrote to {name}"
        _compare(out_TNH, step, spec, pool, layer, case)


@torch.inference_mode()
def _check_captured(
    backend: AttentionBackend, step: _ProofStep, spec: AttentionSpec, pool: KVPool, case: AttentionCase
) -> None:
    """Check a decode step as in a graph: nothing is captured, but code that a replay would not repeat is not called.

    The graph has one more row, and tables and lengths that are written after all planning."""
    num_rows, q_TNH = len(step.q_TNH), torch.cat((step.q_TNH, torch.zeros_like(step.q_TNH[:1])))
    static, lengths = _static_batch(step.batch, pool), np.ones(num_rows + 1, dtype=np.int32)
    np.maximum(step.batch.host_lengths, 1, out=lengths[:num_rows])  # padding has a token
    if is_capturable(backend):
        backend.plan_step(static)
    elif isinstance(backend, GraphAttentionBuilder):
        backend = backend.for_graph(static)
        backend.plan_step(static)
        backend.plan_step(replace(static, host_lengths=lengths))
    else:
        return
    real_B = step.batch.lengths_B > 0
    static.page_table_BP[:num_rows] = torch.where(real_B[:, None], step.batch.page_table_BP, pool.dump_page)
    static.lengths_B.copy_(torch.from_numpy(lengths))
    try:
        for layer in range(min(NUM_LAYERS, spec.num_layers)):
            _compare(backend.attend(layer, q_TNH)[:num_rows], step, spec, pool, layer, case)
    except AssertionError as error:
        raise AssertionError(f"as a graph calls it: {error}") from error


def _static_batch(batch: AttentionBatch, pool: KVPool) -> AttentionBatch:
    """Return a batch with one more row than ``batch``; every row has one token, on the dump page."""
    num_rows, width = batch.page_table_BP.shape
    ones = np.ones(num_rows + 1, dtype=np.int32)
    return AttentionBatch(
        num_decodes=num_rows + 1,
        page_table_BP=batch.page_table_BP.new_full((num_rows + 1, width), pool.dump_page),
        lengths_B=batch.lengths_B.new_ones(num_rows + 1),
        query_starts_B1=torch.arange(num_rows + 2, dtype=torch.int32, device=batch.lengths_B.device),
        host_lengths=ones,
        host_query_lengths=ones,
    )


def _compare(
    out_TNH: Tensor, step: _ProofStep, spec: AttentionSpec, pool: KVPool, layer: int, case: AttentionCase
) -> None:
    """Raise AssertionError with the place of the largest error, if it is too large."""
    sinks_N = spec.sinks[layer] if spec.sinks else None
    absolute, relative = TOLERANCES[case.dtype]
    allowed_more = LOUD_TOLERANCE if case.loud else 1.0
    out_TNH = out_TNH.double().cpu()
    worst, message = 0.0, ""
    first = 0
    for index, (slots_L, count) in enumerate(zip(step.slots, step.batch.host_query_lengths.tolist(), strict=True)):
        out_nNH, q_nNH = out_TNH[first : first + count], step.q_TNH[first : first + count]
        first += count
        where = f"layer {layer}, sequence {index} (context {len(slots_L)}, {count} new)"
        if not len(slots_L):
            # Padding: its output is unused, but its K/V are written to the dump page, where NaN would stay.
            assert out_nNH.isfinite().all(), f"{where}: the output of padding must be finite"
            continue
        slots_L = slots_L.to(pool.data.device)
        keys_LGH, values_LGH = pool.read(layer, slots_L)
        window = spec.window_of(layer)
        features = (spec.soft_cap, sinks_N, spec.chunked)
        expected_nNH = attend(q_nNH, keys_LGH, values_LGH, spec.scale, window, *features)
        assert out_nNH.isfinite().all(), f"{where}: NaN or infinity, perhaps from a slot of another sequence"
        error_nNH = (out_nNH - expected_nNH).abs()
        excess_nNH = error_nNH / ((absolute + relative * expected_nNH.abs()) * allowed_more)
        largest = int(excess_nNH.argmax())
        if excess_nNH.flatten()[largest] > worst:
            worst = float(excess_nNH.flatten()[largest])
            query, head, _ = np.unravel_index(largest, excess_nNH.shape)
            message = (
                f"{where}: query {query}, head {head} is off by {error_nNH.flatten()[largest]:.3g}, "
                f"{worst:.3g} times the limit; largest error {error_nNH.max():.3g}"
            )
    assert worst <= 1.0, message
