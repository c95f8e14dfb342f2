"""Communication for a group of one rank: nothing is exchanged.

It does not import torch: a server whose executors are processes loads this plugin too, and needs no torch.
"""

from typing import TYPE_CHECKING

from engine.plugins.hookspecs import CommContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CALLBOARD_PLUGIN = {"api": 1}


class LocalComm:
    """Collectives of a single rank, which return their arguments."""

    rank = 0
    size = 1
    exchanges = True

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """Return the sum over one rank."""
        return tensor

    def all_gather(self, tensor: "Tensor", dim: int = -1) -> "Tensor":
        """Return the rank's part, which is the whole."""
        return tensor

    def all_to_all(self, tensor: "Tensor", sent: "Sequence[int]", received: "Sequence[int]") -> "Tensor":
        """Return what the rank sends to itself."""
        return tensor

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@hookimpl
def callboard_comm(context: CommContext) -> LocalComm:
    """Build the communicator; takes no options.  Raises PluginError for more than one rank."""
    decode_options("comm.local", context.options, Options)
    if context.size != 1:
        raise PluginError(f"comm.local serves one rank, not {context.size}; choose a library that connects ranks")
    return LocalComm()
