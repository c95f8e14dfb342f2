"""A group of ranks for ``model.numerics = "invariant"``: every sum has the same order, that of the ranks.

Owns: that order, and the type by which linear layers know that they must not sum over ranks.  Does not know: libraries;
their own sums begin at a rank that depends on an element's place.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.layers.comm import Comm, ExchangingComm


class OrderedComm:
    """A ``Comm`` that sums in the order of ranks: each rank gathers all parts, so more is sent than for a sum.

    ``RowLinear`` needs no sum: it gathers inputs and cuts outputs, so each output is the sum that one rank would make.
    """

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks in rank order, in place, and return ``tensor``."""
        parts = self._comm.all_gather(tensor[None], 0)
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate every rank's ``tensor`` along ``dim``."""
        return self._comm.all_gather(tensor, dim)

    @property
    def exchanges(self) -> bool:
        """Whether the wrapped library does; an exchange adds nothing up."""
        return isinstance(self._comm, ExchangingComm) and self._comm.exchanges

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows by the wrapped library."""
        assert isinstance(self._comm, ExchangingComm), "the library has no all_to_all"
        return self._comm.all_to_all(tensor, sent, received)

    def close(self) -> None:
        """Close the wrapped group."""
        self._comm.close()
