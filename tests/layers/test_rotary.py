"""Rotation keeps lengths and depends on distances only."""

import torch

from engine.checkpoints.shape import RotaryShape
from engine.layers.rotary import Rotary
from engine.models.frequencies import frequencies


def rotary(shape: RotaryShape, size: int = 16) -> Rotary:
    return Rotary(frequencies(shape, size), shape.attention_factor, torch.float32)


def test_scores_depend_on_the_distance_only():
    layer = rotary(RotaryShape())
    q_TAH, k_TAH = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(2, 5, 1, 16)
    near = layer.rotate(q_TAH, layer.angles(torch.arange(5) + 7)) * layer.rotate(k_TAH, layer.angles(torch.arange(5)))
    far = layer.rotate(q_TAH, layer.angles(torch.arange(5) + 107)) * layer.rotate(
        k_TAH, layer.angles(torch.arange(5) + 100)
    )
    assert torch.allclose(near.sum(-1), near.sum(-1)[:1].expand(5, 1), atol=1e-4)
    assert torch.allclose(near.sum(-1), far.sum(-1), atol=1e-4)


def test_position_zero_changes_nothing():
    layer = rotary(RotaryShape())
    x_TAH = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.rotate(x_TAH, layer.angles(torch.zeros(1, dtype=torch.int64))), x_TAH)


def test_scaled_variants_leave_fast_pairs_and_stretch_slow_ones():
    plain = frequencies(RotaryShape(), 64)
    for kind in ("llama3", "yarn"):
        scaled = frequencies(RotaryShape(kind=kind, factor=8.0, original_max_len=256), 64)
        assert torch.allclose(scaled[0], plain[0])
        assert torch.allclose(scaled[-1], plain[-1] / 8)
        assert (scaled[1:] <= scaled[:-1]).all()
    assert torch.allclose(frequencies(RotaryShape(kind="linear", factor=4.0), 64), plain / 4)
