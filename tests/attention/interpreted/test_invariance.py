"""Triton's attention where results are to be the same in every step: sequences cut in two ways, and captured steps."""

from dataclasses import replace

import pytest
import torch

from engine.layers.attention import AttentionSpec
from engine.plugins.attention.triton import callboard_attention_backend
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.proof import invariance
from engine.plugins.support.paging import new_pool
from engine.plugins.testing.attention import through_hook
from engine.types.errors import PluginError
from tests.attention.batches import batch_of
from tests.attention.interpreted.test_replay import MAX_PAGES, ROWS, SPEC, STEPS, Growing

CPU = torch.device("cpu")
CUTS = ((37, 1, 1, 30), (9, *[1] * 4), (1, 1, 20, 1))
WINDOWED = AttentionSpec(2, 4, 2, 64, 0.1, window=24, first_window_layer=1)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(invariance, "CUTS", CUTS)
    monkeypatch.setattr(invariance, "LENGTHS", tuple(map(sum, CUTS)))


def compare(invariant, dtype=torch.float32, kv_dtype=""):
    pool = new_pool(WINDOWED, invariance.pages_needed(16), 16, dtype, CPU, kv_dtype=kv_dtype)
    backend = through_hook(callboard_attention_backend, invariant=invariant)(WINDOWED, pool)
    invariance.require_same_bits(backend, WINDOWED, pool)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, ""), (torch.float16, ""), (torch.bfloat16, "fp8_e4m3")]
)
def test_a_token_has_the_same_bits_in_every_step(short, dtype, kv_dtype):
    compare(True, dtype, kv_dtype)


def test_decode_kernels_have_other_bits(short):
    with pytest.raises(AssertionError, match="have other bits in steps of"):
        compare(False)


def test_one_capture_serves_every_step():
    growing = Growing()
    batch = replace(
        batch_of(ROWS, width=MAX_PAGES, device=CPU), query_starts_B1=torch.arange(ROWS + 1, dtype=torch.int32)
    )
    attention = TritonAttention(SPEC, growing.pool, invariant=True)
    attention.plan_step(batch)
    for rows, count in STEPS[:3]:
        for row in rows:
            growing.grow(row, count)
        growing.write_to(batch, rows, padding_length=0)
        q_TNH = torch.randn(ROWS, 4, 16, generator=growing.generator)
        for layer in range(2):
            growing.check(layer, rows, q_TNH, attention.attend(layer, q_TNH))


def test_tiles_are_not_measured():
    context = AttentionContext("cpu", "float32", 16, 4, 2, 64, invariant=True, options={"tune": True})
    with pytest.raises(PluginError, match=r"tune=false, or model\.numerics=fast"):
        callboard_attention_backend(context)
