"""The states of recurrent layers: one allocation per rank that holds what each row has of its tokens so far.

Legend: S slots · B rows of a step · T its new tokens · N numbers of one slot · K taps of a convolution
Owns: the memory and its layout, which slots and tokens of a step belong together.
Does not know: what a layer keeps there, which sequence a row is, when a slot is copied.

A slot has the states of all recurrent layers, one after another, in float32: to copy, move or drop the states of a
sequence is one operation on one piece of memory.  Each state begins at a multiple of 64 bytes, as a library may order
a sum by the address of its numbers.  The first slots are the running states of the rank's rows.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.checkpoints.shape import padded
from engine.layers.upload import upload

Sizes = tuple[int, ...]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class RecurrentStates:
    """Slots with the states of all recurrent layers.

    data: float32 [S, N].  layers: per recurrent layer its states, views [S, ...] of ``data``.
    slot: returns [N], the states of a slot or of a copy; None without copies.
    arrived: number -> [N], states in host memory that wait for the step that takes them."""

    def __init__(self, layers: Sequence[Sequence[Sizes]], num_slots: int, device: torch.device) -> None:
        """Allocate the slots.  layers: per recurrent layer the sizes of its states."""
        numbers = [[padded(sizes) for sizes in one] for one in layers]
        self.data = torch.zeros(num_slots, sum(map(sum, numbers)), dtype=torch.float32, device=device)
        self.slot: Callable[[int], Tensor] | None = None
        self.arrived: dict[int, Tensor] = {}
        self.layers: list[tuple[Tensor, ...]] = []
        start = 0
        for states, lengths in zip(layers, numbers, strict=True):
            parts = self.data[:, start : start + sum(lengths)].split(lengths, dim=1)
            pairs = zip(parts, states, strict=True)
            self.layers.append(tuple(part[:, : prod(sizes)].unflatten(1, sizes) for part, sizes in pairs))
            start += sum(lengths)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self.data)


class PromptRows(NamedTuple):
    """The rows of a step with many tokens, and those with few, int32 on the device.

    firsts_N, ends_N: of the tokens of each chunk of the rows with many."""

    few_F: Tensor
    many_M: Tensor
    firsts_N: Tensor
    ends_N: Tensor


class StatesOfStep:
    """The states as the rows of one step read and write them.

    layers: per recurrent layer its states, as in ``RecurrentStates``.
    query_lengths: new tokens of each row, on the host.  query_starts: index in T of the first of them.
    only_decodes: whether each row has one token.  longest: most tokens of a row.
    slots_B: int64, fresh_B, starts_B1: int32, on the device: slot of each row, whether it begins, where its tokens are.
    singles: otherwise the rows with one token, and these tokens; None without.
    segments: the other rows, each with its tokens."""

    def __init__(self, states: RecurrentStates, slots_B: Int64, lengths_B: Int32, query_lengths_B: Int32) -> None:
        """Take a step's rows.  slots_B: slot of each.  lengths_B: context length, new tokens included.

        A row begins in this step if it has no context but new tokens: the content of its slot counts as zeros."""
        assert 0 <= slots_B.min() <= slots_B.max() < states.num_slots, f"slots {slots_B} of {states.num_slots}"
        self._states, self._slots, self._lengths = states, slots_B, lengths_B
        self.layers = states.layers
        self.query_lengths = query_lengths_B
        self.query_starts = np.cumsum(query_lengths_B) - query_lengths_B
        self.only_decodes = bool((query_lengths_B == 1).all())
        self._device = states.data.device
        self.num_rows, self.longest = len(slots_B), int(query_lengths_B.max())
        fresh_B = (lengths_B == query_lengths_B).astype(np.int32)
        starts_B1 = np.append(self.query_starts, query_lengths_B.sum()).astype(np.int32)
        self.slots_B, self.fresh_B, self.starts_B1 = upload((slots_B, fresh_B, starts_B1), self._device)
        self._begins = bool(fresh_B.any())
        self.singles: tuple[Tensor, Tensor] | None = None
        self.segments: list[tuple[int, slice]] = []
        if not self.only_decodes:
            self._divide()
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompts: dict[tuple[int, int], PromptRows] = {}

    def _divide(self) -> None:
        """Divide the rows into those with one token and the others."""
        (rows,) = (self.query_lengths == 1).nonzero()
        if len(rows):
            at_rows, at_tokens = upload((rows, self.query_starts[rows]), self._device)
            self.singles = at_rows, at_tokens
        for row, (start, count) in enumerate(zip(self.query_starts, self.query_lengths, strict=True)):
            if count > 1:
                self.segments.append((row, slice(int(start), int(start + count))))

    def rows(self) -> Iterator[tuple[int, bool, slice]]:
        """Yield the slot of each row, whether the row begins in this step, and its tokens."""
        begins = self._lengths == self.query_lengths
        for slot, fresh, start, count in zip(self._slots, begins, self.query_starts, self.query_lengths, strict=True):
            yield int(slot), bool(fresh), slice(int(start), int(start + count))

    def one_by_one(self) -> "Iterator[tuple[slice, StatesOfStep]]":
        """Yield each token with a step of this token alone, in their order."""
        if len(self.query_lengths) == self.query_lengths.sum() == 1:
            yield slice(0, 1), self
            return
        one = np.ones(1, dtype=np.int32)
        for row, (start, count) in enumerate(zip(self.query_starts, self.query_lengths, strict=True)):
            slot, before = self._slots[row : row + 1], self._lengths[row] - count
            for offset in range(count):
                alone = StatesOfStep(self._states, slot, one + before + offset, one)
                yield slice(int(start) + offset, int(start) + offset + 1), alone

    def read(self, states_S: Tensor) -> Tensor:
        """Return the state of each row before the step, a copy, [B, ...]."""
        states_B = states_S.index_select(0, self.slots_B)
        if self._begins:
            states_B.masked_fill_(self.fresh_B.bool().view(-1, *[1] * (states_B.dim() - 1)), 0.0)
        return states_B

    def write(self, states_S: Tensor, states_B: Tensor) -> None:
        """Replace the state of each row."""
        states_S.index_copy_(0, self.slots_B, states_B)

    def mixed(self, mix: "Mix", inner_TI: Tensor, states: tuple[Tensor, ...], width: int) -> Tensor:
        """Return what ``mix`` gives a recurrent part for the step, [T, ``width``]."""
        return mix(inner_TI, states, self)

    def prompts(self, fewest: int, chunk: int) -> "PromptRows":
        """Return the rows with at least ``fewest`` tokens, and the chunks of these."""
        if (fewest, chunk) not in self._prompts:
            counts, starts = self.query_lengths, self.query_starts
            (few,), (many,) = (counts < fewest).nonzero(), (counts >= fewest).nonzero()
            firsts = [np.arange(starts[row], starts[row] + counts[row], chunk) for row in many]
            ends = [
                np.minimum(first + chunk, starts[row] + counts[row]) for first, row in zip(firsts, many, strict=True)
            ]
            lists = (few, many, *(np.concatenate([[], *one]) for one in (firsts, ends)))
            on_device = upload([one.astype(np.int32) for one in lists], self._device)
            self._prompts[fewest, chunk] = PromptRows(*on_device)
        return self._prompts[fewest, chunk]

    def taps(self, num_taps: int) -> tuple[Tensor, Tensor]:
        """Return the places of what a causal convolution reads, in a table of the K - 1 last inputs of each row before
        the step, [B * (K - 1)], and after them the step's tokens, [T].

        Return at_KT, the inputs of each token, the oldest first; and kept_B, [B * (K - 1)], the last of each row."""
        if num_taps not in self._taps:
            self._taps[num_taps] = self._new_taps(num_taps - 1)
        return self._taps[num_taps]

    def _new_taps(self, num_before: int) -> tuple[Tensor, Tensor]:
        num_rows = len(self.query_lengths)
        row_T = np.repeat(np.arange(num_rows), self.query_lengths)
        offset_T = np.arange(len(row_T)) - self.query_starts[row_T]

        def places(row: Int64, offset: Int64) -> Int64:
            """Return the places of inputs by their distance from a row's first new token."""
            new = num_rows * num_before + self.query_starts[row] + offset
            return np.where(offset >= 0, new, (row + 1) * num_before + offset)

        back_K1 = np.arange(-num_before, 1)[:, None]
        last_B1 = self.query_lengths[:, None] + np.arange(-num_before, 0)
        at_KT = places(row_T, offset_T + back_K1)
        kept_B = places(np.arange(num_rows)[:, None], last_B1)
        at, kept = upload((at_KT.ravel(), kept_B.ravel()), self._device)
        return at.view(at_KT.shape), kept


Mix = Callable[[Tensor, tuple[Tensor, ...], StatesOfStep], Tensor]
"""A recurrent part between its two products: (inner_TI, its states, the step's rows) -> mixed_TM."""


class StatesOfDecodes(StatesOfStep):
    """The same for a decode step whose rows only the device knows, as a captured step has them."""

    def __init__(self, states: RecurrentStates, rows_B: Tensor, starts_B1: Tensor) -> None:
        """Take the rows, int64; a row's slot has its number.  starts_B1: int32, the numbers from 0 on.

        A negative row is padding: it begins in each step, in the last slot, which is no row's."""
        self._states, self.layers = states, states.layers
        self.num_rows, self.longest, self.only_decodes, self._begins = len(rows_B), 1, True, True
        is_padding_B = rows_B < 0
        self.slots_B = rows_B.masked_fill(is_padding_B, states.num_slots - 1)
        self.fresh_B, self.starts_B1 = is_padding_B.to(torch.int32), starts_B1

    def one_by_one(self) -> Iterator[tuple[slice, StatesOfStep]]:
        for row in range(self.num_rows):
            alone = copy(self)
            alone.num_rows, alone.starts_B1 = 1, self.starts_B1[:2]
            alone.slots_B, alone.fresh_B = (one[row : row + 1] for one in (self.slots_B, self.fresh_B))
            yield slice(row, row + 1), alone
