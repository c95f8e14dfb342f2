"""Ranks that are threads of the test, with collectives that a recorded graph holds.

Each collective is one operation of torch, so the double records it, and a replay meets the other ranks again.
"""

import threading
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from engine.plugins.testing.threads import ThreadComm

RANKS = WeakValueDictionary[int, ThreadComm]()  # by address: arguments of operations are tensors and numbers


@torch.library.custom_op("callboard_test::sum_of_ranks", mutates_args=("tensor",))
def sum_of_ranks(tensor: Tensor, rank: int) -> None:
    """Sum over ranks."""
    RANKS[rank].all_reduce(tensor)


@torch.library.custom_op("callboard_test::rows_of_ranks", mutates_args=())
def rows_of_ranks(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """Gather over ranks."""
    return RANKS[rank].all_gather(tensor, dim)


class CapturedComm:
    """A rank.  num_sums: calls of ``all_reduce``; replays call none."""

    capturable = True

    def __init__(self, rank: int, posted: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(posted)
        self.num_sums = 0
        self._barrier = barrier
        self._comm = ThreadComm(rank, posted, barrier)
        RANKS[id(self._comm)] = self._comm

    @property
    def is_closed(self) -> bool:
        """Whether a rank of the group has left."""
        return self._barrier.broken

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.num_sums += 1
        sum_of_ranks(tensor, id(self._comm))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return rows_of_ranks(tensor, id(self._comm), dim)

    def close(self) -> None:
        """Let ranks that wait for this one fail."""
        self._barrier.abort()


def new_group(size: int) -> list[CapturedComm]:
    """Return the ranks of a new group."""
    barrier, posted = threading.Barrier(size), list[Tensor | None]([None] * size)
    return [CapturedComm(rank, posted, barrier) for rank in range(size)]
