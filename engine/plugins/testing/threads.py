"""A tensor-parallel group whose ranks are threads of the test: a stand-in for a real library, without processes.

Owns: the exchange, and running a function on every rank.  Does not know: models, the exchanged data.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
TIMEOUT_S = 300.0  # enough on a machine with far more ranks than cores


class ThreadComm:
    """One rank.  Ranks that do not make the same call fail at the barrier instead of waiting forever."""

    def __init__(self, rank: int, posted: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(posted)
        self._posted = posted
        self._barrier = barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum in rank order, so that every rank gets the same bits."""
        parts = self._exchange(tensor)
        return tensor.copy_(torch.stack(parts).sum(0))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(tensor), dim)

    @property
    def exchanges(self) -> bool:
        """Whether ranks can exchange rows."""
        return True

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows that each rank has sent here."""
        assert sum(sent) == len(tensor), f"{len(tensor)} rows, of which {list(sent)} are sent"
        sizes = self._exchange(torch.tensor(list(sent)))
        rows = [
            torch.split(part, size.tolist())[self.rank]
            for part, size in zip(self._exchange(tensor), sizes, strict=True)
        ]
        assert [len(one) for one in rows] == list(received), f"{[len(one) for one in rows]} rows, not {list(received)}"
        return torch.cat(rows)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        assert not tensor.is_meta, "a meta tensor has no numbers to exchange"
        # A copy, since a rank that continues may overwrite its tensor before the others have read it.
        self._posted[self.rank] = tensor.clone()
        self._barrier.wait(TIMEOUT_S)
        parts = [one for one in self._posted if one is not None]
        self._barrier.wait(TIMEOUT_S)
        return parts


def on_ranks(size: int, work: Callable[[ThreadComm], Result]) -> list[Result]:
    """Run ``work`` on every rank of a group and return the results in rank order."""
    posted: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def one_rank(rank: int) -> Result:
        try:
            return work(ThreadComm(rank, posted, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one_rank, range(size)))
