"""What a layer needs from the communication library, as a Protocol; and a place in a group that is not there."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Comm(Protocol):
    """Collectives over one tensor-parallel group.  All ranks call the same ones in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; returns ``tensor``.  The same bits on every rank, or they would sample apart."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate every rank's ``tensor`` (equal shapes) along ``dim``, in rank order."""
        ...

    def close(self) -> None:
        """Leave the group after a failure, and give up what is queued: ranks that wait for this one shall fail, too.

        It waits for no other rank.  No graph holds a collective of the group any more.  Again: no effect."""
        ...


@runtime_checkable
class CapturableComm(Protocol):
    """What a library has beside, if it knows whether its collectives can be recorded into a CUDA graph."""

    capturable: bool


class Unconnected:
    """A rank's place in a group that is not there: for a plan of a model, on the meta device, nobody need answer."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """What it is given: a sum has the same shape."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Of the shape that all ranks' parts have together."""
        return torch.cat([tensor] * self.size, dim)

    def close(self) -> None:
        """Do nothing: nothing is held."""
