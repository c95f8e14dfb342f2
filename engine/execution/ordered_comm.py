"""Sums over ranks in the order of ranks, whatever the size of what is added up.

Owns: that order.  Does not know: libraries, whose own sums begin at a rank that depends on an element's place.
"""

from torch import Tensor

from engine.layers.comm import Comm


class OrderedComm:
    """See ``Comm``.  Every rank gets all ranks' parts: as many times what a sum would send."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``Comm``."""
        parts = self._comm.all_gather(tensor[None], 0)
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """See ``Comm``."""
        return self._comm.all_gather(tensor, dim)

    def close(self) -> None:
        """See ``Comm``."""
        self._comm.close()
