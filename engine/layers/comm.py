"""The collectives that layers need, as a Protocol, and a stand-in for a group that does not exist."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Comm(Protocol):
    """Collectives over one tensor-parallel group.  All ranks call the same ones in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place, and return ``tensor``: the same bits on every rank, so that all sample the same."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate every rank's ``tensor`` (equal shapes) along ``dim``, in rank order."""
        ...

    def close(self) -> None:
        """Leave the group after a failure and discard queued work, so that ranks waiting for this one fail, too.

        Waits for no other rank.  By then no graph holds a collective of the group.  A second call has no effect."""
        ...


@runtime_checkable
class NormingComm(Comm, Protocol):
    """A library that can sum, add to the residual stream and normalise in one launch.

    norms: whether it ever does, the same on every rank."""

    norms: bool

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        """Add the sum of ``part`` over ranks to x in place and return x / sqrt(mean(x^2) + eps) * weight of that.

        None, with nothing done, if these sizes are summed otherwise, which is so on every rank or on none."""
        ...


@runtime_checkable
class ExchangingComm(Comm, Protocol):
    """A library by which each rank can send something else to each other one.

    exchanges: whether it does now, the same on every rank; not where a run is recorded, whose sizes stay the same."""

    @property
    def exchanges(self) -> bool: ...

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``tensor``'s next ``sent[r]`` rows to each rank r; return ``received[r]`` rows of each, in rank order.

        tensor: contiguous.  A rank receives from r as many rows as r sends to it."""
        ...


@runtime_checkable
class CapturableComm(Protocol):
    """A library that declares whether a CUDA graph can hold its collectives."""

    capturable: bool


def is_capturable(comm: Comm) -> bool:
    """Return whether a CUDA graph can hold a library's collectives."""
    return isinstance(comm, CapturableComm) and comm.capturable


class Unconnected:
    """A rank of a group that does not exist: a model planned on the meta device needs shapes and no answers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``: a sum has the same shape."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return a tensor of the gathered shape."""
        return torch.cat([tensor] * self.size, dim)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
