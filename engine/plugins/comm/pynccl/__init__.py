"""Communication by a thin binding to the NCCL that torch ships, with fewer layers than torch's process group.

Unlike ``comm.torch`` it has no stream of its own and no event between streams, so a captured graph holds the bare
collectives; and no watchdog thread.

Owns: the options, and the start of a group.  Does not know: NCCL's functions (``library.py``).
"""

from engine.plugins.comm.pynccl.group import NcclComm
from engine.plugins.comm.pynccl.library import NcclError, NcclLibrary, find_library
from engine.plugins.hookspecs import CommContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.rendezvous import open_store
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cuda"]}
NAME = "comm.pynccl"


class NcclOptions(Options, frozen=True):
    """Options of the plugin.

    library: path of libnccl.so.2; 'auto' for the one that torch was installed with.
    timeout_s: how long a rank waits for the others at the start."""

    library: str = "auto"
    timeout_s: float = 600.0


@hookimpl
def callboard_comm(context: CommContext) -> NcclComm:
    """Build the communicator for ranks with a GPU each, on one machine or several."""
    options = decode_options(NAME, context.options, NcclOptions)
    if context.device != "cuda":
        raise PluginError(f"{NAME} connects NVIDIA GPUs, not {context.device!r}; set plugins.comm=torch")
    try:
        library = NcclLibrary(find_library() if options.library == "auto" else options.library)
        store = open_store(NAME, context.rendezvous, context.rank, context.size, options.timeout_s)
        return NcclComm(library, store, context.rank, context.size)
    except NcclError as error:
        raise PluginError(f"{NAME}: {error}") from error
