"""What a child process is told: how to reach its engine, and then what to be.

Owns: the shape of both.  Does not know: who sends them, how they travel.
The ticket comes over a pipe and says as little as possible; the rest comes over the link that it opens.
"""

import msgspec

from engine.actors.snapshot import RequestsFinished, Snapshot
from engine.config import Config
from engine.errors import (
    CallboardError,
    ConfigError,
    EngineDied,
    GraphError,
    PluginError,
    StepTooLarge,
    WeightsError,
)
from engine.logs import LogSettings
from engine.messages import (
    ExecutorFailed,
    FrontOrder,
    Handover,
    IngressInbox,
    Message,
    Step,
    Stop,
    TokenizerInbox,
)
from engine.workers.keys import ClientKeys

# Errors that mean the same on both sides of a process boundary; any other is told as text.
SPOKEN = {error.__name__: error for error in (ConfigError, WeightsError, PluginError, GraphError)}


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's own machine knows better than the server's: where its checkpoint and tokenizer lie (as in
    ``model.path`` and ``model.tokenizer``; empty where the server's will do), and which GPU it takes."""

    local_rank: int
    path: str = ""
    tokenizer: str = ""


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How to reach the engine.  rank: of an executor, or a tokenizer's number, or 0.

    parent: the process to die with; 0 for none.  place: of a rank of several machines."""

    rank: int
    link: str
    endpoint: str
    keys: ClientKeys
    parent: int = 0
    place: Place | None = None


class Assignment(Message, frozen=True):
    """The first message to an executor: one rank of a group of ``num_ranks``.

    rendezvous: where the ranks meet to form their communicator, as torch.distributed's ``init_method`` has it; empty
    for a group of one.  config: with the model's path resolved.  num_pages: of the pool, once the engine knows, or 0.
    most_tokens: steps with more are cut; 0 for no limit.  heartbeat_s: how often to say that it is alive.
    capacity: messages that its mailbox holds.  fingerprint: of the checkpoint, which may lie elsewhere for a rank on
    another machine; empty if that is not to be looked at.  local_rank: its GPU; None for the one of its rank's number.
    """

    rank: int
    num_ranks: int
    rendezvous: str
    config: Config
    num_pages: int
    most_tokens: int
    max_len: int
    capacity: int
    heartbeat_s: float
    logs: LogSettings
    progress: bool
    fingerprint: str = ""
    local_rank: int | None = None


class TokenizerAssignment(Message, frozen=True):
    """The first message to a tokenizer process.  The rest as in ``Assignment``."""

    config: Config
    capacity: int
    heartbeat_s: float
    logs: LogSettings


class FrontAssignment(Message, frozen=True):
    """The first message to the front's process.  The rest as in ``Assignment``.

    has_tokenizers: in processes, which must be ready as well.  listener: the inherited descriptor of its socket."""

    config: Config
    max_len: int
    vocab_size: int
    has_tokenizers: bool
    listener: int
    capacity: int
    heartbeat_s: float
    logs: LogSettings
    handover: Handover


ExecutorProcessInbox = Assignment | Step | Stop
TokenizerProcessInbox = TokenizerAssignment | TokenizerInbox | Stop
FrontProcessInbox = FrontAssignment | IngressInbox | FrontOrder | Snapshot | RequestsFinished | Stop


def spoken_error(failed: ExecutorFailed) -> CallboardError:
    """The error that an executor's process has ended with."""
    if failed.num_tokens:
        return StepTooLarge(failed.message, failed.num_tokens)
    return spoken(failed.kind, failed.message, f"executor{failed.rank}")


def spoken(kind: str, message: str, name: str) -> CallboardError:
    """An error that the process ``name`` has told."""
    known = SPOKEN.get(kind)
    return known(message) if known is not None else EngineDied(f"{name} crashed: {kind}: {message}")
