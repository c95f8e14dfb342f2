"""The two halves of recurrent parts: a product before the recurrence, one after it, and the order of tokens.

Legend: T new tokens of a step · D model dim · I outputs of the first product · M inputs of the second one
Owns: the two halves of a ``Recurrent``.  Does not know: which recurrence a part computes.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear, RowLinear
from engine.layers.recurrences import Recurrences
from engine.layers.states import StatesOfStep
from engine.layers.torch_recurrences import TorchRecurrences


class RecurrentPart:
    """A recurrent part between two products.  inner, outer: the products.

    recurrences: what computes between them."""

    inner: ColumnLinear
    outer: RowLinear
    recurrences: Recurrences = TorchRecurrences()
    _one_by_one = False

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the model's linear kernel computes (``Recurrent``)."""
        return self.inner, self.outer

    @abstractmethod
    def mix(self, inner_TI: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        """Return mixed_TM from the first product, and advance the states."""

    def advance(
        self, normed_TD: Tensor, states: tuple[Tensor, ...], step: StatesOfStep, kernels: LayerKernels | None
    ) -> Tensor:
        mix = self._mix_alone if self._one_by_one else self.mix
        return step.mixed(mix, self.inner(normed_TD), states, self.outer.inputs_of_rank)

    def _mix_alone(self, inner_TI: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        return torch.cat([self.mix(inner_TI[token], states, alone) for token, alone in step.one_by_one()])

    def output(self, mixed_TM: Tensor) -> Tensor:
        return self.outer(mixed_TM)

    def by_rows(self) -> None:
        """Compute token after token, each alone (``RowwisePart``), where chunks or other rows would change a sum."""
        self.recurrences = self.recurrences.by_rows()
        self._one_by_one = not self.recurrences.rowwise

    def pack(self, kernels: LayerKernels | None) -> None:
        """Take the device's kernels, if it has some for recurrent layers; called once, after loading."""
        if kernels is not None and kernels.recurrences is not None:
            self.recurrences = kernels.recurrences
