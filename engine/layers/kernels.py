"""Fused kernels for layers: each is one launch where torch needs several.

Owns: the protocol.  Does not know: the kernels themselves, which are in ``engine/kernels/``.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.checkpoints.shape import RouterShape
from engine.layers.float8_experts import EightBits
from engine.layers.four_bits import FourBits
from engine.layers.recurrences import Recurrences


class LayerKernels(Protocol):
    """Kernels for tensors of one device; a layer that gets None instead computes the same in torch.

    on_cpu: whether they are a CPU's, which also turn a part of each head, or none, and gate what attention gives."""

    on_cpu: bool

    @property
    def recurrences(self) -> Recurrences | None:
        """The kernels of recurrent layers; None for torch."""
        ...

    def add_norm(self, x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """Add ``update_TD`` in place and return the norm of the sum.  None, which adds nothing, is for CPUs alone, and
        an update of [T, K, D], which is summed first, for GPUs."""
        ...

    def angle_table(self, positions_T: Tensor, frequencies_R: Tensor, scale: float) -> Tensor:
        """Return cosines and sines of the positions' angles."""
        ...

    def rotate_and_store(
        self,
        qkv_TAH: Tensor,
        weight_QGH: Tensor | None,
        eps: float,
        angles_TH: Tensor,
        keys_SGH: Tensor,
        values_SGH: Tensor,
        slots_T: Tensor,
        limit: float = 0.0,
    ) -> Tensor:
        """Return normed, rotated queries; store keys and values, clamped to +-``limit`` unless that is 0."""
        ...

    def gated(self, gate_up_T2I: Tensor, kind: str = "silu") -> Tensor:
        """Return activation(gate) * up."""
        ...


@runtime_checkable
class DeviceKernels(LayerKernels, Protocol):
    """Further kernels that only a GPU has.  widest_rounded: numbers of a row that those which round can hold."""

    widest_rounded: int

    def add_norm_round(
        self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float, group: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return ``add_norm``'s result in float8, with a scale per row, or per ``group`` of numbers, [T, G]."""
        ...

    def gated_round(self, gate_up_T2I: Tensor, kind: str = "silu", group: int = 0) -> tuple[Tensor, Tensor]:
        """Return ``gated``'s result in float8, with scales as ``add_norm_round`` has them."""
        ...

    def choose_experts(
        self, scores_TE: Tensor, correction_E: Tensor | None, num_chosen: int, shape: RouterShape, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the weights, in ``dtype``, and the numbers of each token's experts."""
        ...

    def mix_experts(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        gate_up_EOD: Tensor | FourBits | EightBits,
        down_EDI: Tensor | FourBits | EightBits,
        gate_up_bias_EO: Tensor | None,
        down_bias_ED: Tensor | None,
        kind: str,
        limit: float = 0.0,
        slope: float = 1.0,
        first_expert: int | None = None,
        summed: bool = True,
    ) -> Tensor:
        """Return the sum of weight * expert(x) over a token's experts that are on this rank, or the summands."""
        ...

    def embed_shard(self, token_ids_T: Tensor, table_VD: Tensor, first: int) -> Tensor:
        """Return rows of this rank's part of the embedding; zeros for tokens of other parts."""
        ...
