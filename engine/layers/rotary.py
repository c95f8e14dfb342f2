"""Rotary position embedding (Su et al. 2021) and its stretched variants.

Legend: T new tokens in the step · A query and key heads · H head size · R rotated pairs, H / 2 or fewer
Owns: the rotation.  Does not know: how frequencies are chosen, attention, where positions come from.
"""

import torch
from torch import Tensor

from engine.layers.kernels import LayerKernels


class Rotary:
    """Rotates pair (i, i + R) of each head, or pair (2 i, 2 i + 1), by position * frequency_i; the rest stays.

    ``angles`` runs once per step, ``rotate`` once per layer.
    whole: whether all of a head is rotated in pairs half a head apart, as ``rotate_and_store`` does it.
    """

    def __init__(
        self,
        frequencies_R: Tensor,
        scale: float,
        dtype: torch.dtype,
        *,
        head_size: int = 0,
        interleaved: bool = False,
    ) -> None:
        """Keep the frequencies: float32, radians per position.  scale: factor of cos and sin.  head_size: 0 for 2 R."""
        self.frequencies_R = frequencies_R
        self.scale = scale
        self.half = len(frequencies_R)
        self.dtype = dtype
        self.interleaved = interleaved
        self.turned = 2 * self.half
        self.whole = self.turned >= head_size and not interleaved

    def angles(self, positions_T: Tensor, kernels: LayerKernels | None = None) -> tuple[Tensor, ...]:
        """Return cos_T1H and sin_T1H in the model's dtype, with the signs that ``rotate`` expects.

        With kernels that can rotate like this, return one tensor, the input of ``rotate_and_store``.
        """
        if kernels is not None and self.fits(kernels):
            return (kernels.angle_table(positions_T, self.frequencies_R, self.scale),)
        angles_TR = positions_T[:, None] * self.frequencies_R
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if self.scale != 1.0:
            cos_TR, sin_TR = cos_TR * self.scale, sin_TR * self.scale
        sides = ((cos_TR, cos_TR), (-sin_TR, sin_TR))
        if self.interleaved:
            cos_TH, sin_TH = (torch.stack(pair, -1).flatten(-2) for pair in sides)
        else:
            cos_TH, sin_TH = (torch.cat(pair, -1) for pair in sides)
        return cos_TH.to(self.dtype)[:, None], sin_TH.to(self.dtype)[:, None]

    def fits(self, kernels: LayerKernels) -> bool:
        """Return whether the kernels rotate like this."""
        return self.whole or (kernels.on_cpu and not self.interleaved)

    def rotate(self, x_TAH: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
        """Return x with its heads, or their rotated part, turned."""
        if self.turned < x_TAH.shape[-1]:
            turned, kept = x_TAH[..., : self.turned], x_TAH[..., self.turned :]
            return torch.cat((self._turn(turned, angles), kept), -1)
        return self._turn(x_TAH, angles)

    def _turn(self, x_TAH: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
        cos_T1H, sin_T1H = angles
        return torch.addcmul(x_TAH * cos_T1H, self._swapped(x_TAH), sin_T1H)

    def _swapped(self, x_TAH: Tensor) -> Tensor:
        """Return x with the two sides of each pair exchanged."""
        if self.interleaved:
            return x_TAH.reshape(*x_TAH.shape[:-1], self.half, 2).flip(-1).flatten(-2)
        return x_TAH.roll(self.half, -1)  # a roll by half a head exchanges the sides in one operation
