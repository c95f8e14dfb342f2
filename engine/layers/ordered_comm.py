"""A group of ranks for ``model.numerics = "invariant"``: sums have one order, whatever is added up.

Owns: that order, and what tells linear layers to add nothing up over ranks.  Does not know: libraries, whose own sums
begin at a rank that depends on an element's place.
"""

from torch import Tensor

from engine.layers.comm import Comm


class OrderedComm:
    """See ``Comm``.  A sum is in the order of ranks: each gets all parts, as many times what a sum would send.

    ``RowLinear`` needs none: it gathers inputs and cuts outputs, so each output is the sum that one rank would make."""

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
