"""Communication of a group of one: nothing to exchange.

Does not import torch: a server whose executors are processes loads this plugin too, and needs no torch itself.
"""

from typing import TYPE_CHECKING

from engine.plugins.hookspecs import CommContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

CALLBOARD_PLUGIN = {"api": 1}


class LocalComm:
    """The collectives of a single rank return what they are given."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """The sum over one rank."""
        return tensor

    def all_gather(self, tensor: "Tensor", dim: int = -1) -> "Tensor":
        """One rank's part is the whole."""
        return tensor

    def close(self) -> None:
        """Do nothing: nothing is held."""


@hookimpl
def callboard_comm(context: CommContext) -> LocalComm:
    """Takes no options.  Refuses more than one rank."""
    decode_options("comm.local", context.options, Options)
    if context.size != 1:
        raise PluginError(f"comm.local serves one rank, not {context.size}; choose a library that connects ranks")
    return LocalComm()
