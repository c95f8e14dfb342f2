"""The two halves of recurrent parts: a product before the recurrence, one after it, and the order of tokens.

Legend: T new tokens of a step · D model dim · I outputs of the first product · M inputs of the second one
Owns: the two halves of a ``Recurrent``.  Does not know: which recurrence a part computes.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear, RowLinear
from engine.layers.states import StatesOfStep


class RecurrentPart:
    """A recurrent part between two products.  inner, outer: the products."""

    inner: ColumnLinear
    outer: RowLinear
    _one_by_one = False

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """Layers that the model's linear kernel computes (``Recurrent``)."""
        return self.inner, self.outer

    @abstractmethod
    def mix(self, inner_TI: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        """Return mixed_TM from the first product, and advance the states."""

    def advance(
        self, normed_TD: Tensor, states: tuple[Tensor, ...], step: StatesOfStep, kernels: LayerKernels | None
    ) -> Tensor:
        """Return what ``output`` takes, and advance the states (``Recurrent``)."""
        inner_TI = self.inner(normed_TD)
        if not self._one_by_one:
            return self.mix(inner_TI, states, step)
        return torch.cat([self.mix(inner_TI[token], states, alone) for token, alone in step.one_by_one()])

    def output(self, mixed_TM: Tensor) -> Tensor:
        """Return the layer's output (``Recurrent``)."""
        return self.outer(mixed_TM)

    def by_rows(self) -> None:
        """Compute token after token, each alone (``RowwisePart``): then neither chunks nor other rows change a sum."""
        self._one_by_one = True
