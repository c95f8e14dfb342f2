"""What an executor's process is told: how to reach its engine, and then what to be.

Owns: the shape of both.  Does not know: who sends them, how they travel.
The ticket comes over a pipe and says as little as possible; the rest comes over the link that it opens.
"""

import msgspec

from engine.config import Config
from engine.errors import CallboardError, ConfigError, EngineDied, GraphError, PluginError, WeightsError
from engine.links.curve import ClientKeys
from engine.messages import Message, Step, Stop

# Errors that mean the same on both sides of a process boundary; any other is told as text.
SPOKEN = {error.__name__: error for error in (ConfigError, WeightsError, PluginError, GraphError)}


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How to reach the engine.  parent: the process to die with; 0 for a rank on another machine."""

    rank: int
    link: str
    endpoint: str
    keys: ClientKeys
    parent: int = 0


class Assignment(Message, frozen=True):
    """The first message to an executor: one rank of a group of ``num_ranks``.

    rendezvous: where the ranks meet to form their communicator, as torch.distributed's ``init_method`` has it; empty
    for a group of one.  config: with the model's path resolved, and the pool's size fixed when the engine knows it.
    heartbeat_s: how often to say that it is alive.  capacity: messages that its mailbox holds.
    """

    rank: int
    num_ranks: int
    rendezvous: str
    config: Config
    max_len: int
    capacity: int
    heartbeat_s: float
    log_level: int
    progress: bool


ExecutorProcessInbox = Assignment | Step | Stop


def spoken_error(kind: str, message: str, rank: int) -> CallboardError:
    """The error that an executor's process has ended with."""
    known = SPOKEN.get(kind)
    return known(message) if known is not None else EngineDied(f"executor{rank} crashed: {kind}: {message}")
