"""Root-mean-square normalisation (Zhang and Sennrich 2019), of hidden states and of attention heads.

Legend: T new tokens in the step · D model dim · A query and key heads · H head size
Owns: the formula and its quick form on a CPU.  Does not know: which model it is in.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.kernels import LayerKernels
from engine.layers.weights import WeightSlice, parameter, whole


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in float32."""

    def __init__(self, size: int, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        self.eps = eps
        self.size = size
        self.weight = parameter(size, device=device, dtype=dtype)
        self._floor: Tensor | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self._floor is None:
            return F.rms_norm(x_TD, (self.size,), self.weight, self.eps)
        return self._divide_by_length(x_TD, self._floor)

    def added(self, x_TD: Tensor, update_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        """``x += update``, in place, and the norm of the sum."""
        if kernels is not None:
            return kernels.add_norm(x_TD, update_TD, self.weight, self.eps)
        return self(x_TD.add_(update_TD))

    def pack(self, kernels: LayerKernels | None = None) -> None:
        """Prepare for the device; called once, after loading.  Kernels take the weight as it is.

        On a CPU torch computes the formula in seven small operations.  Written with the vector's length,
        x / hypot(|x|, sqrt(D eps)) * (weight sqrt(D)), it takes four and 1.3 to 1.9 times less time.
        """
        if kernels is None and self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            self._floor = torch.tensor(math.sqrt(self.size * self.eps))
            self.weight.mul_(math.sqrt(self.size))

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this layer reads from a checkpoint."""
        yield whole(f"{prefix}.weight", self.weight)

    def _divide_by_length(self, x: Tensor, floor: Tensor) -> Tensor:
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
        return torch.div(x, length).mul_(self.weight)


class HeadNorm(RMSNorm):
    """RMSNorm over each query and key head, all heads in one call: the two weights are spread over the heads."""

    def __init__(
        self, num_queries: int, num_keys: int, size: int, eps: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(size, eps, device, dtype)
        self.num_queries = num_queries
        self.weight = parameter(num_queries + num_keys, size, device=device, dtype=dtype)

    def __call__(self, x_TAH: Tensor) -> Tensor:
        if self._floor is None:
            return F.rms_norm(x_TAH, (self.size,), None, self.eps) * self.weight
        return self._divide_by_length(x_TAH, self._floor)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this layer reads from a checkpoint."""
        for head, weight_H in enumerate(self.weight):
            yield whole(f"{prefix}.{'q_norm' if head < self.num_queries else 'k_norm'}.weight", weight_H)
