"""The states of recurrent layers: one allocation per rank that holds what each row has of its tokens so far.

Legend: S slots · B rows of a step · T its new tokens · N numbers of one slot
Owns: the memory and its layout, the copies from slot to slot.
Does not know: what a layer keeps there, which sequence a row is, when a slot is copied.

A slot has the states of all recurrent layers, one after another, in float32: to copy, move or drop the states of a
sequence is one operation on one piece of memory.  The first slots are the running states of the rank's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Sizes = tuple[int, ...]


class RecurrentStates:
    """Slots with the states of all recurrent layers.

    data: float32 [S, N].  layers: per recurrent layer its states, views [S, ...] of ``data``."""

    def __init__(self, layers: Sequence[Sequence[Sizes]], num_slots: int, device: torch.device) -> None:
        """Allocate the slots.  layers: per recurrent layer the sizes of its states."""
        numbers = [[prod(sizes) for sizes in one] for one in layers]
        self.data = torch.zeros(num_slots, sum(map(sum, numbers)), dtype=torch.float32, device=device)
        self.layers: list[tuple[Tensor, ...]] = []
        start = 0
        for states, lengths in zip(layers, numbers, strict=True):
            parts = self.data[:, start : start + sum(lengths)].split(lengths, dim=1)
            self.layers.append(tuple(part.unflatten(1, one) for part, one in zip(parts, states, strict=True)))
            start += sum(lengths)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self.data)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots.  sources, targets: int64, on the device; all are read before one is written."""
        self.data.index_copy_(0, targets, self.data.index_select(0, sources))


@dataclass(slots=True)
class StatesOfStep:
    """The states as one step reads and writes them.

    slots_B: int64, the slot of each row of the step.
    fresh_B: bool, whether the row begins in this step: what its slot holds then counts as zeros.
    query_lengths: new tokens of each row, on the host.  num_decodes: first rows that have one token each.
    """

    states: RecurrentStates
    slots_B: Tensor
    fresh_B: Tensor
    query_lengths: Sequence[int]
    num_decodes: int
