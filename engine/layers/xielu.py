"""A plain MLP with xIELU (Huang and Schlag 2024), whose numbers are learned.

Legend: T new tokens in the step · I intermediate features of this rank
Owns: the activation.  Does not know: which model it is in, files.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.xielu import XIELUShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.mlp import MLP, activated_by_rows
from engine.layers.weights import WeightSlice, joined, parameter, whole

NAMES = ("alpha_p", "alpha_n", "beta", "eps")


class XIELU(MLP):
    """An ``MLP`` whose activation of x is a x^2 + beta x above 0, and c (e^min(x, eps) - 1 - x) + beta x below.

    a is the softplus of alpha_p, and c that of alpha_n plus beta."""

    def __init__(
        self, shape: XIELUShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self.numbers = shape.numbers
        self.alpha_p, self.alpha_n = (parameter(1, device=device, dtype=dtype) for _ in range(2))
        self.beta, self.eps = (parameter(device=device, dtype=dtype) for _ in range(2))
        del self._activate  # the method below takes its place: a reference to it here would be a cycle
        self._is_by_rows = False

    def by_rows(self) -> None:
        self._is_by_rows = True

    def pack(self, kernels: LayerKernels | None) -> None:
        """Compute the factors; called once, after loading."""
        for name, number in zip(NAMES, self.numbers, strict=False):
            getattr(self, name).fill_(number)
        self.above, self.below = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().slices(prefix)
        for name in () if self.numbers else NAMES:
            yield whole(f"{joined(prefix, self.shape.name)}.act_fn.{name}", getattr(self, name))

    def _activate(self, x_TI: Tensor, kind: str) -> Tensor:
        return activated_by_rows(x_TI, kind, self._activated) if self._is_by_rows else self._activated(x_TI, kind)

    def _activated(self, x_TI: Tensor, kind: str) -> Tensor:
        below_TI = self.below * (torch.expm1(torch.minimum(x_TI, self.eps)) - x_TI)
        return torch.where(x_TI > 0, self.above * x_TI * x_TI, below_TI) + self.beta * x_TI
