"""Slices of checkpoint tensors, from which a rank's parameters are made: layers describe them, the loader copies.

Owns: the description.  Does not know: files, which layer a slice is for.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.checkpoints.shape import Rows, share
from engine.layers.comm import Comm


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A slice of a checkpoint tensor: ``source``[start : start + length along ``dim``] goes to ``target``.

    shape: of the whole tensor in the checkpoint.
    target: a view of a parameter; if it is longer than ``length`` along ``dim``, the rest is padding and becomes zero.
    member: index in a stack of ``num_members`` tensors of this shape; None if the tensor is no stack.
    """

    source: str
    shape: tuple[int, ...]
    dim: int
    start: int
    length: int
    target: Tensor
    member: int | None = None
    num_members: int = 0

    @property
    def whole_length(self) -> int:
        """Length of the whole tensor along ``dim``; 1 for a single number."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return self.shape if self.member is None else (self.num_members, *self.shape)


def whole(source: str, target: Tensor) -> WeightSlice:
    """Return the slice of a tensor that every rank holds in full."""
    rows = target if target.dim() else target.view(1)
    return WeightSlice(source, tuple(target.shape), 0, 0, rows.shape[0], rows)


def row_slices(source: str, rows: Rows, start: int, target: Tensor) -> Iterator[WeightSlice]:
    """Yield the slices of a tensor for those of ``rows`` that a rank has, from the one with number ``start`` on."""
    shape, size = (rows.height, *target.shape[1:]), rows.count // rows.groups
    while len(target):
        group, inside = divmod(start, size)
        length = min(len(target), size - inside)
        place = group * (rows.height // rows.groups) + rows.first + inside
        yield WeightSlice(source, shape, 0, place, length, target[:length])
        start, target = start + length, target[length:]


def part_slices(
    sides: Mapping[str, Tensor | None], prefix: str, parts: Iterable[tuple[Rows, int, int]]
) -> Iterator[WeightSlice]:
    """Yield the slices of rows that lie one after the other.

    sides: kind of tensor -> memory, None for none.  parts: (rows over all ranks, first row, rows of this rank)."""
    at = 0
    for rows, start, length in parts:
        for kind, side in sides.items():
            if side is not None:
                yield from row_slices(joined(joined(prefix, rows.name), kind), rows, start, side[at : at + length])
        at += length


def own_part(source: str, total: int, comm: Comm, target: Tensor) -> WeightSlice:
    """Return the slice of a tensor that ranks divide evenly, or of which each has all."""
    return WeightSlice(source, (total,), 0, comm.rank * len(target) % total, len(target), target)


def cut(rows: Rows, comm: Comm | None) -> tuple[Rows, int, int]:
    """Return the rows, and the first one and the number of those of this rank.  comm: None for no cut.

    With more ranks than units, neighbours have copies of one."""
    if comm is None:
        return rows, 0, rows.count
    if 0 < rows.units < comm.size:
        share(comm.size, rows.units, f"ranks over {rows.name}")
        mine = rows.count // rows.units
        return rows, comm.rank * rows.units // comm.size * mine, mine
    mine = share(rows.count, comm.size, f"outputs of {rows.name}")
    return rows, comm.rank * mine, mine


def joined(prefix: str, name: str) -> str:
    """Return a tensor's name from two parts; either may be empty."""
    return ".".join(part for part in (prefix, name) if part)


def merged(parts: Iterable[WeightSlice], name: str) -> Iterator[WeightSlice]:
    """Change slices for a checkpoint that has the parts one after the other in ``name``.weight and ``name``.bias."""
    by_kind: defaultdict[str, list[WeightSlice]] = defaultdict(list)
    for part in parts:
        by_kind[part.source.rpartition(".")[2]].append(part)
    for kind, own in by_kind.items():
        rows, first = sum(part.shape[0] for part in own), 0
        for part in own:
            shape = (rows, *part.shape[1:])
            yield replace(part, source=f"{name}.{kind}", shape=shape, start=first + part.start)
            first += part.shape[0]


def transposed(slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
    """Change slices for a checkpoint that has its matrices as [inputs, outputs]."""
    for one in slices:
        if len(one.shape) == 1:
            yield one
        else:
            yield replace(one, shape=one.shape[::-1], dim=1 - one.dim, target=one.target.t())


def not_here(slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
    """Change slices to empty ones: this rank reads nothing of those tensors."""
    for one in slices:
        yield replace(one, start=0, length=0, target=one.target.narrow(one.dim, 0, 0))


def parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Return uninitialised memory for a weight; the loader fills every element."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)
