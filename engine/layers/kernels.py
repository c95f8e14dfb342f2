"""What fused kernels do for layers, each in one launch where torch needs several.

Owns: the protocol.  Does not know: kernels; ``engine/kernels/`` has them, and says what each computes.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


class LayerKernels(Protocol):
    """Kernels on tensors of one device; layers that are given None compute the same in torch."""

    def add_norm(self, x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """Add in place, and return the norm of the sum.  update_TD: None, which a GPU's are not given, for no sum."""
        ...

    def angle_table(self, positions_T: Tensor, frequencies_R: Tensor, scale: float) -> Tensor:
        """Cosines and sines of the positions' angles."""
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
        """Return normed and rotated queries; store keys and values, at most ``limit`` large unless that is 0."""
        ...

    def gated(self, gate_up_T2I: Tensor, kind: str = "silu") -> Tensor:
        """The activation of gates times what they let through."""
        ...


@runtime_checkable
class DeviceKernels(LayerKernels, Protocol):
    """What those of a GPU do beside."""

    def mix_experts(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        gate_up_EOD: Tensor,
        down_EDI: Tensor,
        gate_up_bias_EO: Tensor | None,
        down_bias_ED: Tensor | None,
        kind: str,
        limit: float = 0.0,
        slope: float = 1.0,
        first_expert: int | None = None,
    ) -> Tensor:
        """The sum over those of a token's experts that are here of weight * expert(x)."""
        ...

    def embed_shard(self, token_ids_T: Tensor, table_VD: Tensor, first: int) -> Tensor:
        """Rows of a part of the embedding, zeros for tokens of other parts."""
        ...
