"""Rotary position embedding (Su et al. 2021) and its stretched variants.

Legend: T new tokens in the step · A query and key heads · H head size · R rotated pairs, H / 2
Owns: the rotation.  Does not know: how frequencies are chosen, attention, where positions come from.
"""

import torch
from torch import Tensor

from engine.layers.kernels import LayerKernels


class Rotary:
    """Turns pair (i, i + H/2) of each head by position * frequency_i.

    ``angles`` runs once per step, ``rotate`` once per layer.
    """

    def __init__(self, frequencies_R: Tensor, scale: float, dtype: torch.dtype) -> None:
        """frequencies_R: float32, radians per position.  scale multiplies cos and sin."""
        self.frequencies_R = frequencies_R
        self.scale = scale
        self.half = len(frequencies_R)
        self.dtype = dtype

    def angles(self, positions_T: Tensor, kernels: LayerKernels | None = None) -> tuple[Tensor, ...]:
        """cos_T1H and sin_T1H in the model's dtype; sin is negated in its first half, as ``rotate`` wants it.

        With kernels one tensor, as ``rotate_and_store`` wants it.
        """
        if kernels is not None:
            return (kernels.angle_table(positions_T, self.frequencies_R, self.scale),)
        angles_TR = positions_T[:, None] * self.frequencies_R
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if self.scale != 1.0:
            cos_TR, sin_TR = cos_TR * self.scale, sin_TR * self.scale
        cos_TH = torch.cat((cos_TR, cos_TR), -1)
        sin_TH = torch.cat((-sin_TR, sin_TR), -1)
        return cos_TH.to(self.dtype)[:, None], sin_TH.to(self.dtype)[:, None]

    def rotate(self, x_TAH: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
        """x rotated.  Rolling by half a head swaps the pairs' two sides in one operation."""
        cos_T1H, sin_T1H = angles
        return torch.addcmul(x_TAH * cos_T1H, x_TAH.roll(self.half, -1), sin_T1H)
