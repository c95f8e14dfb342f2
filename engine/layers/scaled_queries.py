"""Attention whose queries are scaled after their rotation: by their position, or by learned weights.

Legend: T new tokens in the step (ragged, packed) · Q query heads · H head size · P steps of a temperature
Owns: the factors.  Does not know: projections, rotation, which backend attends.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.query_shapes import (
    LateNormAttentionShape,
    TemperatureShape,
    TemperedAttentionShape,
    TemperedLatentShape,
)
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.latent_attention import LatentAttention
from engine.layers.self_attention import SelfAttention
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice, joined, parameter, whole


class Temperature:
    """The factors of queries by their positions, in a table: a token's factor has the same bits in every step."""

    def __init__(self, shape: TemperatureShape, device: torch.device) -> None:
        self.shape = shape
        steps_P = torch.arange((shape.max_len + shape.offset) // shape.period + 2, device=device)
        self.factors_P = 1 + shape.strength * torch.log1p(steps_P.float())

    def scale(self, q_TQH: Tensor, positions_T: Tensor) -> Tensor:
        """Multiply the queries in place and return them."""
        steps_T = (positions_T + self.shape.offset) // self.shape.period
        return q_TQH.mul_(self.factors_P[steps_T][:, None, None])


class TemperedAttention(SelfAttention):
    """A ``SelfAttention`` whose queries have a temperature."""

    def __init__(
        self, shape: TemperedAttentionShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self.temperature = Temperature(shape.temperature, device)

    def project(
        self, index: int, normed_TD: Tensor, rotary: Any, angles: Any, step: StepTensors, kernels: Any
    ) -> Tensor:
        """Return rotated and scaled queries, and store keys and values (``Attention.project``)."""
        q_TQH = super().project(index, normed_TD, rotary, angles, step, kernels)
        return self.temperature.scale(q_TQH, step.positions_T)


class TemperedLatentAttention(LatentAttention):
    """A ``LatentAttention`` whose queries have a temperature."""

    def __init__(
        self, shape: TemperedLatentShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self.temperature = Temperature(shape.temperature, device)

    def project(
        self, index: int, normed_TD: Tensor, rotary: Any, angles: Any, step: StepTensors, kernels: Any
    ) -> Tensor:
        """Return scaled queries in the space of latents, and store the step's latents (``Attention.project``)."""
        q_TQH = super().project(index, normed_TD, rotary, angles, step, kernels)
        return self.temperature.scale(q_TQH, step.positions_T)


class LateNormAttention(SelfAttention):
    """A ``SelfAttention`` whose weights of head norms apply after rotation.

    A score is a sum of products q_h k_h, so the weights of keys multiply the queries, too, and keys are stored without
    them.  factors_H: the product of both weights."""

    def __init__(
        self, shape: LateNormAttentionShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self.names = (shape.query_norm, shape.key_norm)
        self.weights_2H = parameter(2, shape.head_size, device=device, dtype=dtype)
        self.factors_H: Tensor = self.weights_2H[0]

    def project(
        self, index: int, normed_TD: Tensor, rotary: Any, angles: Any, step: StepTensors, kernels: Any
    ) -> Tensor:
        """Return rotated and scaled queries, and store keys and values (``Attention.project``)."""
        return super().project(index, normed_TD, rotary, angles, step, kernels).mul_(self.factors_H)

    def pack(self, kernels: LayerKernels | None) -> None:
        super().pack(kernels)
        self.factors_H = self.weights_2H[0] * self.weights_2H[1]

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().slices(prefix)
        for name, weight_H in zip(self.names, self.weights_2H, strict=True):
            yield whole(f"{joined(prefix, self.shape.name)}.{name}.weight", weight_H)
