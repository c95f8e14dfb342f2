"""Decode rows cut into shares: however lengths, shares and the blocks that lengths are read in fall together."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from engine.layers.attention import AttentionBackend, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import backend as backend_module
from engine.plugins.attention.triton import decode
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.tiles import DecodeTiles, GpuProcessors
from engine.plugins.proof.attention import check_case
from engine.plugins.proof.attention_cases import AttentionCase
from tests.attention.batches import batch_of
from tests.kernels.interpreted.planting import with_mistake

KEYS = 16  # of a tile


def with_programs(count: int, per_processor: int = 1) -> AttentionFactory:
    """A factory of backends with so many processors and small tiles."""

    def factory(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        attention = TritonAttention(spec, pool, GpuProcessors("few", count, 227 << 10))
        attention._default_decode = DecodeTiles(KEYS, num_warps=4, num_stages=2, programs=per_processor)
        return attention

    return factory


def rows_of(*lengths: int) -> AttentionCase:
    rows = tuple((length, 1) for length in lengths)
    return AttentionCase(f"rows {lengths}", ((rows, ()),), "float32", page_size=4, head_size=8, num_kv_heads=1)


@pytest.mark.parametrize("programs", [1, 2, 5, 50])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (150,), (16, 16, 16), (17, 33, 1), (90, 1, 1, 100, 15)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_any_number_of_programs(lengths: tuple[int, ...], programs: int) -> None:
    check_case(rows_of(*lengths), with_programs(programs))


@pytest.mark.parametrize(("num_heads", "group"), [(64, 32), (40, 20)])
def test_latents_of_bfloat16_are_read_once_for_up_to_32_heads(num_heads: int, group: int) -> None:
    found = []

    def factory(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        attention = TritonAttention(spec, pool, GpuProcessors("few", 3, 227 << 10))
        found.append(attention._group)
        return attention

    steps = ((((70, 1), (1, 1), (17, 1)), ((5, 5), (20, 3))),)
    check_case(
        AttentionCase("latents", steps, "bfloat16", 4, 24, num_kv_heads=1, ratio=num_heads, latent_size=16), factory
    )
    assert set(found) == {group}


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_with_a_window(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = rows_of(*rng.integers(1, 150, rng.integers(1, 9)).tolist())
    window, programs = int(rng.choice([1, 15, 16, 17, 60])), int(rng.integers(1, 12))
    windowed = AttentionCase(case.name, case.steps, "float32", 4, 8, num_kv_heads=1, window=window)
    check_case(windowed, with_programs(programs))


@pytest.mark.parametrize(("merged_bytes", "merge_programs"), [(1 << 20, 1), (0, 1), (0, 4096)])
def test_more_rows_and_parts_than_are_read_together(
    monkeypatch: pytest.MonkeyPatch, merged_bytes: int, merge_programs: int
) -> None:
    monkeypatch.setattr(backend_module, "MERGED_BYTES", merged_bytes)
    monkeypatch.setattr(backend_module, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(backend_module, "PARTS_AT_ONCE", 2)
    monkeypatch.setattr(backend_module, "MAX_MERGE_PROGRAMS", merge_programs)
    check_case(rows_of(200, 3, 40, 17, 100), with_programs(3, per_processor=4))
    if not merged_bytes:
        return
    prompts = AttentionCase(
        "prompts", (((), ((5, 5), (40, 3), (33, 33), (2, 1), (18, 18))),), "float32", 4, 8, num_kv_heads=1
    )
    check_case(prompts, with_programs(3))


Order = Callable[[int], int]


def in_order(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    """Let the interpreter run the programs of a grid's second axis in another order; order: by their number."""
    set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx

    def set_other(builder: interpreter.InterpreterBuilder, x: int, y: int, z: int) -> None:
        set_grid_idx(builder, x, order(y) % builder.grid_dim[1], z)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", set_other)


def merged_twice(monkeypatch: pytest.MonkeyPatch, order: Order, latent_size: int = 0) -> Tensor:
    """Return the results of four programs for a row of four parts, two at once, after a step with other rows.

    Raises AssertionError if a place still counts."""
    with monkeypatch.context() as patched:
        in_order(patched, order)
        patched.setattr(backend_module, "PARTS_AT_ONCE", 2)
        spec = AttentionSpec(1, 4, 1 if latent_size else 2, 16, 0.25, latent_size=latent_size)
        place = ("layer_first", "", latent_size)
        pool = KVPool(1, 48, 4, spec.num_kv_heads, 16, torch.float32, torch.device("cpu"), *place)
        pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(0)))
        processors = 4 * (4 // TritonAttention(spec, pool, GpuProcessors("one", 1, 227 << 10))._group)
        attention = TritonAttention(spec, pool, GpuProcessors("few", processors, 227 << 10))
        attention._default_decode = DecodeTiles(KEYS, num_warps=4, num_stages=2, programs=1)
        batch = batch_of(4, width=32, device=torch.device("cpu"))
        for row, lengths in enumerate([(113, 0, 3, 9), (128, 0, 0, 0)]):
            batch.lengths_B.copy_(torch.tensor(lengths))
            batch.page_table_BP.copy_(torch.arange(4 * 32).view(4, 32) * 7 % 48)
            attention.plan_step(batch)
            out_TNH = attention.attend(0, torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(row)))
            assert not attention._arrived.any(), "a part is still counted"
        return out_TNH


@pytest.mark.parametrize("latent_size", [0, 8])
def test_whichever_program_is_the_last_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch, latent_size: int) -> None:
    first = merged_twice(monkeypatch, lambda y: y, latent_size)
    for order in (lambda y: 3 - y, lambda y: 3 * y + 1):
        assert torch.equal(merged_twice(monkeypatch, order, latent_size), first)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.store(counter, 0)", "tl.store(counter, 4)"),
        ("place_S, share_S <= last_share", "place_S, share_S < last_share"),
        (
            "share_S = first_share + done + s_S",
            "share_S = first_share + (done + s_S + tl.program_id(1)) % (last_share - first_share + 1)",
        ),
        ("== last_share - first_share\n", "== last_share - first_share - 1\n"),
    ],
    ids=["not reset", "a part left out", "an order of its own", "before the last part"],
)
def test_a_mistake_of_the_last_program_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    expected = merged_twice(monkeypatch, lambda y: y)
    monkeypatch.setattr(
        backend_module, "decode_attention", with_mistake(decode, right, wrong, tmp_path).decode_attention
    )
    with pytest.raises(AssertionError):
        for order in (lambda y: y, lambda y: 3 - y):
            assert torch.equal(merged_twice(monkeypatch, order), expected)


def test_rows_of_no_length_among_others_read_nothing_and_give_zeros() -> None:
    """Padding of a captured batch; its entries of the page table point at pages of somebody else, here of NaN."""
    spec = AttentionSpec(1, 4, 2, 16, 0.25)
    pool = KVPool(1, 6, 4, 2, 16, torch.float32, torch.device("cpu"))
    pool.data.fill_(torch.nan)
    pool.data[:, :, 1:3] = torch.randn(1, 2, 2, 4, 2, 16, generator=torch.Generator().manual_seed(0))
    attention = TritonAttention(spec, pool)
    batch = batch_of(5, width=2, device=torch.device("cpu"))
    batch.lengths_B.copy_(torch.tensor([0, 4, 0, 0, 7]))
    batch.page_table_BP[1] = torch.tensor([1, 0])
    batch.page_table_BP[4] = torch.tensor([1, 2])
    q_TNH = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(1))
    attention.plan_step(batch)
    out_TNH = attention.attend(0, q_TNH)
    assert (out_TNH[[0, 2, 3]] == 0).all()
    assert out_TNH.isfinite().all()
    keys, values = (slots[4:12].repeat_interleave(2, 1) for slots in (pool.keys(0), pool.values(0)))
    for row, length in ((1, 4), (4, 7)):
        weights_NL = torch.einsum("nh,lnh->nl", q_TNH[row], keys[:length]).mul(0.25).softmax(-1)
        expected_NH = torch.einsum("nl,lnh->nh", weights_NL, values[:length])
        torch.testing.assert_close(out_TNH[row], expected_NH, rtol=1e-5, atol=1e-5)
