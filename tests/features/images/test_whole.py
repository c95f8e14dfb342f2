"""Attention of pictures that are seen whole is that in both directions, in the layers that have it."""

import torch
from torch import Tensor

from engine.features.images.whole import WholeAttention, WholePicture
from engine.layers.attention import AttentionSpec

SPEC = AttentionSpec(num_layers=2, num_heads=1, num_kv_heads=1, head_size=4, scale=0.5, window=4, full_layers=(1,))
KEYS, VALUES = (torch.randn(7, 1, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


class Nothing:
    """A backend that computes zeros, and a pool with keys and values of one row."""

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        return torch.zeros_like(q_TNH)

    def own_slots(self, layer: int, slots_L: Tensor) -> Tensor:
        return slots_L

    def read(self, layer: int, slots_L: Tensor) -> tuple[Tensor, Tensor]:
        return KEYS[slots_L], VALUES[slots_L]


def expected(first_keys: list[int]) -> Tensor:
    """The attention of the queries at positions 3 to 6, each from its first key on to the picture's end."""
    rows = []
    for query, first in zip(KEYS[3:7, 0], first_keys, strict=True):
        weights = (KEYS[first:, 0] @ query * SPEC.scale).softmax(0)
        rows.append(weights @ VALUES[first:, 0])
    return torch.stack(rows)[:, None]


def test_a_picture_is_seen_whole_in_each_layer_or_in_those_with_a_window() -> None:
    nothing, picture = Nothing(), WholePicture(1, 5, 3, torch.arange(7))
    q_TNH = torch.cat((torch.zeros(1, 1, 4), KEYS[3:7], torch.zeros(1, 1, 4)))
    for in_windows in (False, True):
        attention = WholeAttention(nothing, SPEC, nothing, [picture], in_windows=in_windows)  # type: ignore[arg-type]
        windowed, full = (attention.attend(layer, q_TNH) for layer in range(2))
        torch.testing.assert_close(windowed[1:5], expected([0, 1, 2, 3]))
        torch.testing.assert_close(full[1:5], torch.zeros_like(full[1:5]) if in_windows else expected([0] * 4))
        assert not any(bool(one[place].any()) for one in (windowed, full) for place in (0, 5))
