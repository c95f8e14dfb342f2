"""The rotation by positions with three axes: each rotated pair has the position of one of them.

Legend: T new tokens in the step (ragged, packed) · R rotated pairs of a head
        H numbers of a token in a table of angles
Owns: which axis a pair goes by.  Does not know: where positions come from.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.kernels import LayerKernels
from engine.layers.rotary import Rotary
from engine.models.decoder import Decoder
from engine.plugins.encoder.encoder import Axes


class AxesRotary(Rotary):
    """A rotation whose positions may have three axes; with one it is the usual one."""

    def __init__(self, usual: Rotary, axes: Axes) -> None:
        vars(self).update(vars(usual))
        pairs = torch.tensor(list(axis_of_pairs(axes, usual.half)), device=usual.frequencies_R.device)
        self._axis_H = pairs.repeat_interleave(2) if usual.interleaved else pairs.repeat(2)

    def angles(self, positions_T: Tensor, kernels: LayerKernels | None = None) -> tuple[Tensor, ...]:
        if positions_T.dim() == 1:
            return super().angles(positions_T, kernels)
        by_axis = [super(AxesRotary, self).angles(one_T, kernels) for one_T in positions_T]
        return tuple(self._chosen(*tables) for tables in zip(*by_axis, strict=True))

    def _chosen(self, frame: Tensor, line: Tensor, column: Tensor) -> Tensor:
        """Return each pair's angles from the table of its axis."""
        return torch.where(self._axis_H == 0, frame, torch.where(self._axis_H == 1, line, column))


def axis_of_pairs(axes: Axes, num_pairs: int) -> Iterator[int]:
    """Yield the axis of each pair: 0 frame, 1 line, 2 column."""
    for pair in range(num_pairs):
        if axes.interleaved:
            turn = pair % 3
            yield turn if pair < 3 * axes.sections[turn] else 0
        else:
            ends = (axes.sections[0], axes.sections[0] + axes.sections[1])
            yield 0 if pair < ends[0] else 1 if pair < ends[1] else 2


def turn_by_axes(model: Decoder, axes: Axes) -> None:
    """Let a model rotate by positions with three axes where a step has them."""
    model.rotaries = [AxesRotary(one, axes) for one in model.rotaries]
