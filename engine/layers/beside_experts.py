"""A mixture of experts and an MLP for all tokens side by side, each between norms of its own.

Legend: T new tokens in the step · D model dim · E experts · K experts of a token
Owns: these norms, the router's input, the factor of each expert.  Does not know: which model it is in.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.layered_shape import BesideExpertsShape
from engine.layers.comm import Comm
from engine.layers.experts import Experts
from engine.layers.kernels import LayerKernels
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm, rms_norm
from engine.layers.weights import WeightSlice, parameter, whole


class BesideExperts(Experts):
    """A ``FeedForward`` of both, whose input is the layer's sum before any norm."""

    def __init__(
        self, shape: BesideExpertsShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        arguments = (hidden_size, comm, device, dtype)
        self._dense = GatedMLP(shape.dense, *arguments)
        self.linears = [*self._dense.linears, *self.linears]
        self._router_norm = RMSNorm(hidden_size, shape.eps, device, dtype)
        self._factors_E = parameter(shape.num_experts, device=device, dtype=dtype)
        norms = (shape.before_dense, shape.behind_dense, shape.before_experts, shape.behind_experts)
        self._before_dense, self._behind_dense, self._before_experts, self._behind_experts = (
            rms_norm(one, *arguments) for one in norms
        )
        self._norms = (self._before_dense, self._behind_dense, self._before_experts, self._behind_experts)

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Return the sum of both, [T, D], a new tensor."""
        dense_TD = self._behind_dense(self._dense(self._before_dense(x_TD), kernels))
        weights_TK, experts_TK = self.router(self._router_norm(x_TD), self._kernels)
        weights_TK = weights_TK * self._factors_E[experts_TK]
        mixed_TD = self.mixed(self._before_experts(x_TD), weights_TK, experts_TK, kernels)
        return self._behind_experts(mixed_TD).add_(dense_TD)

    def by_rows(self) -> None:
        """Compute both by rows (``RowwisePart``)."""
        super().by_rows()
        self._dense.by_rows()

    def leave_sum(self) -> None:
        """Return None: a norm follows the sum over ranks."""

    def leave_parts(self) -> bool:
        """Return False: a norm follows the sum over a token's experts."""
        return False

    def pack(self, kernels: LayerKernels | None) -> None:
        super().pack(kernels)
        self._router_norm.weight.mul_(self._router_norm.size**-0.5)
        for norm in (self._router_norm, *self._norms):
            norm.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from self._dense.slices(prefix)
        yield whole(f"{prefix}.router.scale", self._router_norm.weight)
        yield whole(f"{prefix}.router.per_expert_scale", self._factors_E)
        for norm in self._norms:
            yield from norm.slices(prefix)
        yield from super().slices(prefix)
