"""Messages between a worker and its engine, besides those of the worker's actor.

Owns: the assignment that a worker starts from, its reports (ready, alive, about to end), and the messages between the
frontend's process and its engine.  Does not know: senders, transport.
"""

import msgspec

from engine.actors.inboxes import ExecutorInbox, IngressInbox, SchedulerInbox, TokenizerInbox
from engine.actors.operations import Operate, Operated, SettingsChanged
from engine.actors.snapshot import GetSnapshot, RequestsFinished, Snapshot, Subscribe
from engine.config import Config
from engine.host.logs import LogSettings
from engine.messages import Abort, Admit, Deltas, Failed, Stop, Tokenize
from engine.types.errors import (
    CallboardError,
    ConfigError,
    EngineDied,
    GraphError,
    PluginError,
    StepTooLarge,
    WeightsError,
)
from engine.types.notices import Message, Profile

# Errors that are raised again on the other side of a process boundary; any other is sent as text.
RAISED_AGAIN = {error.__name__: error for error in (ConfigError, WeightsError, PluginError, GraphError)}


# ---- starting a worker ----------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The values that a rank's own machine sets in place of the server's.

    local_rank: its GPU.  path, tokenizer: of its checkpoint, as in ``model.path`` and ``model.tokenizer``; '' for the
    server's."""

    local_rank: int
    path: str = ""
    tokenizer: str = ""


class Assignment(Message, frozen=True, kw_only=True):
    """The fields of the first message to a worker of any kind.

    config: with the model's path resolved.  capacity: messages that its mailbox holds.
    heartbeat_s: seconds between reports that it is alive."""

    config: Config
    capacity: int
    heartbeat_s: float
    logs: LogSettings


class ExecutorAssignment(Assignment, frozen=True, kw_only=True):
    """The first message to an executor: one rank of a group of ``num_ranks``.

    rendezvous: where the ranks meet to form their communicator, an ``init_method`` of torch.distributed; '' for one
    rank.  num_pages: of the pool, once known, or 0.  most_tokens: steps with more tokens are cut; 0 for no limit.
    fingerprint: of the checkpoint, which may have another path on another machine; '' for no check.
    local_rank: its GPU; None for the one of its rank's number.  given: see ``RankContext``.
    """

    rank: int
    num_ranks: int
    rendezvous: str
    num_pages: int
    most_tokens: int
    max_len: int
    progress: bool
    fingerprint: str = ""
    local_rank: int | None = None
    given: dict[str, bytes] = msgspec.field(default_factory=dict)


class TokenizerAssignment(Assignment, frozen=True, kw_only=True):
    """The first message to a tokenizer process."""


class Handover(Message, frozen=True, kw_only=True):
    """The state that a new frontend takes over from earlier ones.

    first_id: larger than the id of any request so far.  replay: messages that ingress would have received by now.
    about: what the server sends every frontend about itself.  state: the last ``FrontendState``."""

    first_id: int = 1
    replay: tuple[IngressInbox | SettingsChanged, ...] = ()
    about: bytes = b""
    state: bytes = b""


class FrontendAssignment(Assignment, frozen=True, kw_only=True):
    """The first message to the frontend's process.

    has_tokenizers: tokenizer processes must be ready too.  listener: the inherited descriptor of its socket."""

    max_len: int
    vocab_size: int
    has_tokenizers: bool
    listener: int
    handover: Handover


# ---- every worker -> the engine -------------------------------------------------------------------


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker has loaded and accepts work.  num_pages: of an executor's KV pool."""

    num_pages: int = 0


class WorkerAlive(Message, frozen=True, kw_only=True):
    """A worker is alive and its event loop runs; sent periodically.

    waiting, peak: of its actor's mailbox, see ``MailboxGauges``."""

    waiting: int = 0
    peak: int = 0


class WorkerFailed(Message, frozen=True, kw_only=True):
    """A worker is about to end.  kind: the name of the exception's class.

    num_tokens: of the step that did not fit the device, if that is the reason."""

    kind: str
    text: str
    num_tokens: int = 0

    @classmethod
    def of(cls, error: Exception) -> "WorkerFailed":
        """Return the message for an exception."""
        num_tokens = error.num_tokens if isinstance(error, StepTooLarge) else 0
        return cls(kind=type(error).__name__, text=str(error), num_tokens=num_tokens)

    def error(self, name: str) -> CallboardError:
        """Return the error to raise for the failed worker ``name``."""
        if self.num_tokens:
            return StepTooLarge(self.text, self.num_tokens)
        known = RAISED_AGAIN.get(self.kind)
        return known(self.text) if known is not None else EngineDied(f"{name} crashed: {self.kind}: {self.text}")


# ---- the frontend's process -> the engine --------------------------------------------------------


class FrontendDrained(Message, frozen=True, kw_only=True):
    """The answer to ``Drain``: no request arrives after this."""


class FrontendState(Message, frozen=True, kw_only=True):
    """State, opaque to the engine, that the next frontend gets after this one is lost."""

    state: bytes


# ---- the engine -> the frontend's process --------------------------------------------------------


class Drain(Message, frozen=True, kw_only=True):
    """Accept no more requests; open ones continue."""


class AbortAll(Message, frozen=True, kw_only=True):
    """End every open request with an error that the server is shutting down."""


class EngineFailed(Message, frozen=True, kw_only=True):
    """The engine died: end every open request with the reason."""

    reason: str


FromWorker = WorkerReady | WorkerAlive | WorkerFailed
# The other messages of each kind of worker, and those to it.
FromTokenizer = Admit | Abort | Deltas | Failed
FromFrontend = Tokenize | Abort | GetSnapshot | Subscribe | Profile | Operate | FrontendDrained | FrontendState
ToFrontend = IngressInbox | SettingsChanged | Drain | AbortAll | EngineFailed | Snapshot | RequestsFinished | Operated
ExecutorProcessInbox = ExecutorAssignment | ExecutorInbox | Stop
TokenizerProcessInbox = TokenizerAssignment | TokenizerInbox | Stop
FrontendProcessInbox = FrontendAssignment | ToFrontend | Stop
# Every message that crosses a queue, except assignments.
AnyMessage = (
    SchedulerInbox | ExecutorInbox | TokenizerInbox | FromWorker | FromTokenizer | FromFrontend | ToFrontend | Stop
)
