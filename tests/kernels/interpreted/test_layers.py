"""The layers' kernels against their formulas in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.activation import gated
from engine.kernels.embedding import embed_shard
from engine.kernels.heads import rotate_and_store
from engine.kernels.norm import add_norm
from engine.kernels.rotary import angle_table
from engine.layers.page_format import PageFormat
from engine.layers.rotary import Rotary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
EPS = 1e-5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounding(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding; the interpreter cuts off what does not fit bfloat16, unlike a GPU."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)


def close(found: Tensor, expected: Tensor) -> None:
    """Within one rounding to the result's dtype, and what float32 arithmetic adds before it."""
    bound = rounding(found.dtype) + 2e-6
    torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound)


@DTYPES
@pytest.mark.parametrize("num_tokens,width", [(1, 1), (3, 100), (5, 64), (2, 1030)])
def test_add_norm_stores_the_sum_and_returns_its_norm(dtype, num_tokens, width):
    x, update = normal(num_tokens, width, dtype=dtype), normal(num_tokens, width, seed=1, dtype=dtype) * 30
    weight = normal(width, seed=2, dtype=dtype)
    stored = x.clone()
    found = add_norm(stored, update, weight, EPS)
    close(stored, x.double() + update.double())
    wide = stored.double()
    close(found, wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double())


def test_add_norm_of_no_tokens_and_of_zeros_and_of_a_view():
    assert add_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)
    assert torch.equal(add_norm(torch.zeros(1, 8), torch.zeros(1, 8), torch.ones(8), EPS), torch.zeros(1, 8))
    update = normal(4, 16)[:, ::2]
    found = add_norm(torch.zeros(4, 8), update, torch.ones(8), EPS)
    close(found, F.rms_norm(update, (8,), None, EPS))


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_tokens,width", [(1, 1), (3, 100), (2, 1500)])
def test_gated(dtype, kind, num_tokens, width):
    gate_up = normal(num_tokens, 2 * width, dtype=dtype) * 3
    gate_up[0, 0] = -80.0  # where exp overflows if it is taken the wrong way round
    gate, up = gate_up.double().chunk(2, -1)
    activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="none" if kind == "gelu" else "tanh")
    close(gated(gate_up, kind), activated * up)


@DTYPES
@pytest.mark.parametrize("first,num_rows", [(0, 10), (10, 10), (20, 7), (40, 0)])
def test_embedding_of_one_rank_has_zeros_for_the_others_tokens(dtype, first, num_rows):
    width = 1030
    table, ids = normal(num_rows, width, dtype=dtype), torch.tensor([0, 9, 10, 19, 20, 26, 27, 1 << 40])
    found = embed_shard(ids, table, first)
    for token_id, row in zip(ids.tolist(), found, strict=True):
        held = first <= token_id < first + num_rows
        assert torch.equal(row, table[token_id - first] if held else torch.zeros(width, dtype=dtype))
    assert embed_shard(ids[:0], table, first).shape == (0, width)


@pytest.mark.parametrize("half,scale", [(1, 1.0), (40, 1.0), (64, 1.25)])
def test_angle_table_is_that_of_torch(half, scale):
    frequencies = 1e6 ** -(torch.arange(half) / half)
    positions = torch.tensor([0, 1, 77, 4095, 131_071])
    found = angle_table(positions, frequencies, scale)
    cos, sin = Rotary(frequencies, scale, torch.float32).angles(positions)
    torch.testing.assert_close(found[:, :half], cos[:, 0, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[:, half:], sin[:, 0, half:], rtol=0, atol=1e-6)
    assert angle_table(positions[:0], frequencies, scale).shape == (0, 2 * half)


@DTYPES
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("num_queries,num_keys,head_size", [(1, 1, 2), (4, 2, 80), (9, 3, 64), (16, 8, 128)])
def test_rotate_and_store(dtype, normalised, num_queries, num_keys, head_size):
    num_tokens, num_slots = 3, 7
    qkv = normal(num_tokens, num_queries + 2 * num_keys, head_size, dtype=dtype)
    weight = normal(num_queries + num_keys, head_size, seed=1, dtype=dtype) if normalised else None
    angles = normal(num_tokens, head_size, seed=2)
    keys, values = torch.full((2, num_slots, num_keys, head_size), 7.0, dtype=dtype)
    slots = torch.tensor([6, -1, 0])
    queries = rotate_and_store(qkv, weight, EPS, angles, keys, values, slots)

    heads = qkv[:, : num_queries + num_keys].double()
    if weight is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    (x, y), (cos, sin) = heads.chunk(2, -1), angles[:, None].double().chunk(2, -1)
    expected = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    # Two products that may cancel: the error is that of the terms, not of the result.
    bound = rounding(dtype) + 4e-6
    scale = (
        (x.abs() * cos.abs() + y.abs() * sin.abs()).maximum(y.abs() * cos.abs() + x.abs() * sin.abs()).repeat(1, 1, 2)
    )
    assert queries.is_contiguous()
    assert ((queries.double() - expected[:, :num_queries]).abs() <= bound * (scale[:, :num_queries] + 1e-6)).all()
    for token, slot in ((0, 6), (2, 0)):
        error = (keys[slot].double() - expected[token, num_queries:]).abs()
        assert (error <= bound * (scale[token, num_queries:] + 1e-6)).all()
        assert torch.equal(values[slot], qkv[token, num_queries + num_keys :])
    assert (keys[1:6] == 7.0).all()
    assert (values[1:6] == 7.0).all()


def test_pages_of_8_bits_get_rounded_numbers_that_fit():
    qkv = normal(2, 3, 4) * 300
    angles = torch.cat((torch.ones(2, 2), torch.zeros(2, 2)), -1)
    keys, values = (torch.zeros(3, 1, 4, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2))
    queries = rotate_and_store(qkv, None, 0.0, angles, keys, values, torch.tensor([1, 2]), 448.0)
    torch.testing.assert_close(queries, qkv[:, :1])
    form = PageFormat(torch.float32, "fp8_e4m3")
    for found, given in ((keys, qkv[:, 1:2]), (values, qkv[:, 2:])):
        expected = form.encode(given).view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(found.float()[1:], expected)
        assert expected.abs().max() == 448.0


def test_values_that_are_not_finite_reach_their_slot_and_nothing_else():
    qkv = normal(2, 3, 4)
    qkv[0, 2] = torch.tensor([np.nan, np.inf, -np.inf, 1.0])
    keys, values = torch.zeros(2, 3, 1, 4)
    angles = torch.cat((torch.ones(2, 2), torch.zeros(2, 2)), -1)
    queries = rotate_and_store(qkv, None, 0.0, angles, keys, values, torch.tensor([1, 2]))
    torch.testing.assert_close(values[1, 0], qkv[0, 2], equal_nan=True)
    torch.testing.assert_close(queries, qkv[:, :1])
    torch.testing.assert_close(keys[1:], qkv[:, 1:2])
