"""The torch backend against the definition of attention, with everything it must not read poisoned by NaN."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import attention
from engine.kernels.attention import CompiledAttention, compiled_attention
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool, Layout
from engine.plugins.attention import torch as backend_module
from engine.plugins.attention.torch import TorchAttention, callboard_attention_backend
from engine.plugins.hookspecs import AttentionContext
from engine.settings.own_kernels import c_compiler
from engine.types.errors import PluginError
from tests.attention.reference import attend_one

CPU = torch.device("cpu")


@dataclass
class Paged:
    """Sequences of (length, queries) in a pool whose every other slot is NaN."""

    spec: AttentionSpec
    pool: KVPool
    batch: AttentionBatch
    q_TNH: Tensor
    slots: list[Tensor]

    def expected(self, layer: int) -> Tensor:
        windowed = self.spec.window and layer >= self.spec.first_window_layer
        rows, first = [], 0
        for slots, length, count in zip(
            self.slots, self.batch.host_lengths, self.batch.host_query_lengths, strict=True
        ):
            keys, values = self.pool.keys(layer)[slots], self.pool.values(layer)[slots]
            for index in range(count):
                end = length - count + index + 1
                window = self.spec.window if windowed else 0
                rows.append(attend_one(self.q_TNH[first + index], keys[:end], values[:end], self.spec.scale, window))
            first += count
        return torch.stack(rows)


def paged(
    spec: AttentionSpec,
    sequences: list[tuple[int, int]],
    page_size: int,
    seed: int,
    shuffled: bool = True,
    dtype: torch.dtype = torch.float32,
    layout: Layout = "layer_first",
    kv_dtype: str = "",
) -> Paged:
    """Random keys, values and queries.  Unused table entries are 0, as the contract says; page 0 may be in use."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_size) for length, _ in sequences]
    num_pages = sum(counts) + 3
    order = rng.permutation(num_pages) if shuffled else np.arange(num_pages)
    heads = (spec.num_kv_heads, spec.head_size)
    pool = KVPool(spec.num_layers, num_pages, page_size, *heads, dtype, CPU, layout, kv_dtype)
    pool.by_page.view(torch.uint8).fill_(0xFF)  # NaN in every type
    table = np.zeros((len(sequences), max(counts) + 1), dtype=np.int32)
    generator = torch.Generator().manual_seed(seed)
    all_slots, taken = [], 0
    for row, ((length, _), count) in enumerate(zip(sequences, counts, strict=True)):
        pages = order[taken : taken + count]
        taken += count
        table[row, :count] = pages
        place = np.arange(length)
        slots = torch.from_numpy(pages[place // page_size] * pool.page_stride + place % page_size)
        for layer in range(spec.num_layers):
            for store in (pool.keys(layer), pool.values(layer)):
                store[slots] = torch.randn(length, *store.shape[1:], generator=generator).to(store.dtype)
        all_slots.append(slots)
    queries = np.array([count for _, count in sequences], dtype=np.int32)
    lengths = np.array([length for length, _ in sequences], dtype=np.int32)
    batch = AttentionBatch(
        num_decodes=int((queries == 1).cumprod().sum()),
        page_table_BP=torch.from_numpy(table),
        lengths_B=torch.from_numpy(lengths),
        query_starts_B1=torch.from_numpy(np.concatenate(([0], queries.cumsum())).astype(np.int32)),
        host_lengths=lengths,
        host_query_lengths=queries,
    )
    q_TNH = torch.randn(int(queries.sum()), spec.num_heads, spec.head_size, generator=generator).to(dtype)
    return Paged(spec, pool, batch, q_TNH, all_slots)


def backends_of(case: Paged) -> list[AttentionBackend]:
    """Torch's, and the one in C where it serves such pages and there is a compiler."""
    compiled = compiled_attention(case.spec, case.pool)
    backends: list[AttentionBackend] = [TorchAttention(case.spec, case.pool)]
    return backends if compiled is None else [*backends, compiled]


def check(case: Paged, tolerance: float) -> None:
    for backend in backends_of(case):
        with torch.inference_mode():
            backend.plan_step(case.batch)
            for layer in range(case.spec.num_layers):
                out_TNH = backend.attend(layer, case.q_TNH)
                assert out_TNH.dtype == case.q_TNH.dtype
                assert out_TNH.shape == case.q_TNH.shape
                worst = (out_TNH.double() - case.expected(layer)).abs().max().item()
                assert worst <= tolerance, f"{type(backend).__name__}: layer {layer} differs by {worst}"


def spec_of(
    num_heads: int, num_kv_heads: int, head_size: int, window: int = 0, first_window_layer: int = 0
) -> AttentionSpec:
    return AttentionSpec(2, num_heads, num_kv_heads, head_size, head_size**-0.5, window, first_window_layer)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
def test_mixed_ragged_batch(page_size: int, shuffled: bool, heads: tuple[int, int]):
    sequences = [(1, 1), (37, 1), (64, 1), (20, 20), (33, 7), (50, 2)]
    check(paged(spec_of(*heads, 16), sequences, page_size, seed=1, shuffled=shuffled), 2e-6)


@pytest.mark.parametrize("window", [0, 9])
def test_single_queries_behind_longer_ones(window: int):
    """A chunk of one token is no decode row, but is computed like one."""
    sequences = [(11, 1), (20, 6), (30, 1), (25, 1), (31, 1), (12, 12), (5, 1)]
    check(paged(spec_of(4, 2, 8, window), sequences, 4, seed=7), 2e-6)


def test_groups_are_cut_by_size_and_by_padding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend_module, "CACHED_BYTES", 100 * 2 * 8 * 4)
    case = paged(
        spec_of(4, 2, 8), [(40, 1), (30, 1), (35, 1), (10, 1), (12, 1), (90, 1), (101, 1), (50, 50)], 4, seed=8
    )
    check(case, 2e-6)
    backend = TorchAttention(case.spec, case.pool)
    backend.plan_step(case.batch)
    assert [(part.first_row, part.last_row) for part in backend._whole] == [
        (0, 2),
        (2, 3),
        (3, 5),
        (5, 6),
        (6, 7),
        (7, 57),
    ]


@pytest.mark.parametrize("window", [1, 5, 16, 40])
@pytest.mark.parametrize("first_window_layer", [0, 1])
def test_sliding_window(window: int, first_window_layer: int):
    sequences = [(1, 1), (39, 1), (64, 1), (30, 30), (33, 9)]
    check(paged(spec_of(4, 2, 8, window, first_window_layer), sequences, 4, seed=2), 2e-6)


@pytest.mark.parametrize(("length", "queries"), [(128, 128), (129, 129), (300, 257), (260, 2)])
@pytest.mark.parametrize("window", [0, 50])
def test_queries_beyond_one_block(length: int, queries: int, window: int):
    check(paged(spec_of(2, 1, 4, window), [(length, queries), (3, 1)], 16, seed=3), 2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float):
    sequences = [(90, 1), (64, 1), (40, 40), (33, 7)]
    for shuffled in (True, False):
        check(paged(spec_of(4, 2, 16), sequences, 16, seed=4, shuffled=shuffled, dtype=dtype), tolerance)


def test_one_strided_slice_of_a_wider_tensor_as_queries():
    """The decoder hands over the query part of a merged product."""
    case = paged(spec_of(4, 2, 8), [(9, 1), (21, 1), (12, 5)], 4, seed=5)
    wider = torch.randn(len(case.q_TNH), 8, 8)
    wider[:, :4] = case.q_TNH
    case.q_TNH = wider[:, :4]
    check(case, 2e-6)


SEQUENCE = st.integers(1, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sequences=st.lists(SEQUENCE, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 0, 3, 8, 64]),
    shuffled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences: list[tuple[int, int]], page_size: int, window: int, shuffled: bool, seed: int):
    check(paged(spec_of(2, 1, 4, window), sequences, page_size, seed, shuffled), 2e-6)


def test_long_neighbouring_pages_are_copied(monkeypatch: pytest.MonkeyPatch):
    """Above a size even keys that lie side by side are copied first; here everything is above it."""
    monkeypatch.setattr(backend_module, "CACHED_BYTES", 0)
    sequences = [(37, 1), (64, 1), (33, 7), (200, 3)]
    check(paged(spec_of(4, 2, 8), sequences, 16, seed=6, shuffled=False), 2e-6)


def context(**changes: object) -> AttentionContext:
    shape = {"page_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
    return AttentionContext(**{"device": "cpu", "dtype": "float32", **shape, **changes})


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("heads", [(2, 2, 128), (6, 2, 64), (8, 1, 80)])
def test_decode_rows_of_common_head_sizes(layout: Layout, heads: tuple[int, int, int]):
    sequences = [(1, 1), (37, 1), (16, 1), (300, 1), (129, 1)]
    for window in (0, 30):
        check(paged(spec_of(*heads, window), sequences, 16, seed=9, layout=layout), 4e-6)


def test_scores_that_are_far_apart_are_weighed_as_torch_weighs_them():
    case = paged(spec_of(4, 2, 64), [(200, 1), (3, 1)], 16, seed=10)
    case.q_TNH *= 60
    check(case, 1e-4)


@pytest.mark.skipif(not c_compiler(), reason="there is no C compiler")
def test_pages_of_float32_are_attended_in_c_and_others_by_torch():
    factory, spec = callboard_attention_backend(context()), spec_of(4, 2, 8)

    def kind(spec: AttentionSpec, dtype: torch.dtype = torch.float32, kv_dtype: str = "") -> type:
        return type(factory(spec, KVPool(2, 3, 4, 2, 8, dtype, CPU, "page_first", kv_dtype)))

    for served in (spec, spec_of(4, 2, 8, window=7), replace(spec, window=7, full_layers=(1,))):
        assert kind(served, kv_dtype="float32") is CompiledAttention
    assert kind(spec, torch.bfloat16) is kind(spec, kv_dtype="int8") is TorchAttention
    assert kind(replace(spec, soft_cap=30.0)) is kind(replace(spec, sinks=(torch.zeros(4),) * 2)) is TorchAttention


def test_torch_does_it_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "compiled", lambda: None)
    case = paged(spec_of(4, 2, 8), [(9, 1)], 4, seed=11)
    assert type(callboard_attention_backend(context())(case.spec, case.pool)) is TorchAttention


def test_it_takes_no_options():
    with pytest.raises(PluginError, match=r"'attention\.torch'.*`fast`"):
        callboard_attention_backend(context(options={"fast": 1}))
