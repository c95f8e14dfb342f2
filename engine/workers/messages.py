"""What a worker and its engine say to each other, besides what its actor sends and receives.

Owns: the assignment that a worker starts from, how it says that it is ready, alive or about to end, and what the
frontend's process and its engine tell each other.  Does not know: who sends them, how they travel.
"""

import msgspec

from engine.actors.operations import Operate, Operated, SettingsChanged
from engine.actors.snapshot import GetSnapshot, RequestsFinished, Snapshot, Subscribe
from engine.config import Config
from engine.host.logs import LogSettings
from engine.messages import (
    Abort,
    Admit,
    Deltas,
    ExecutorInbox,
    Failed,
    IngressInbox,
    Profile,
    SchedulerInbox,
    Stop,
    Tokenize,
    TokenizerInbox,
)
from engine.types.errors import (
    CallboardError,
    ConfigError,
    EngineDied,
    GraphError,
    PluginError,
    StepTooLarge,
    WeightsError,
)
from engine.types.notices import Message

# Errors that mean the same on both sides of a process boundary; any other is told as text.
TOLD_AS_THEMSELVES = {error.__name__: error for error in (ConfigError, WeightsError, PluginError, GraphError)}


# ---- how a worker starts ----------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's own machine knows better than the server's: where its checkpoint and tokenizer lie (as in
    ``model.path`` and ``model.tokenizer``; empty where the server's will do), and which GPU it takes."""

    local_rank: int
    path: str = ""
    tokenizer: str = ""


class Assignment(Message, frozen=True, kw_only=True):
    """What the first message to a worker says whatever its kind.

    config: with the model's path resolved.  capacity: messages that its mailbox holds.  heartbeat_s: how often to say
    that it is alive."""

    config: Config
    capacity: int
    heartbeat_s: float
    logs: LogSettings


class ExecutorAssignment(Assignment, frozen=True, kw_only=True):
    """The first message to an executor: one rank of a group of ``num_ranks``.

    rendezvous: where the ranks meet to form their communicator, as torch.distributed's ``init_method`` has it; empty
    for a group of one.  num_pages: of the pool, once the engine knows, or 0.  most_tokens: steps with more are cut; 0
    for no limit.  fingerprint: of the checkpoint, which may lie elsewhere for a rank on another machine; empty if that
    is not to be looked at.  local_rank: its GPU; None for the one of its rank's number.  given: see ``RankContext``.
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
    """What a frontend must know of those before it.

    first_id: no request had this one yet, nor a larger one.  replay: what ingress would have heard by now.
    about: what the server tells every front of it.  state: what the last one had in ``FrontendState``."""

    first_id: int = 1
    replay: tuple[IngressInbox | SettingsChanged, ...] = ()
    about: bytes = b""
    state: bytes = b""


class FrontendAssignment(Assignment, frozen=True, kw_only=True):
    """The first message to the frontend's process.

    has_tokenizers: in processes, which must be ready as well.  listener: the inherited descriptor of its socket."""

    max_len: int
    vocab_size: int
    has_tokenizers: bool
    listener: int
    handover: Handover


# ---- what every worker says -------------------------------------------------------------------


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker has loaded, and takes work.  num_pages: of an executor's KV pool."""

    num_pages: int = 0


class WorkerAlive(Message, frozen=True, kw_only=True):
    """A worker is there and its event loop turns; sent every so often.

    waiting, peak: of its actor's mailbox, see ``MailboxGauges``."""

    waiting: int = 0
    peak: int = 0


class WorkerFailed(Message, frozen=True, kw_only=True):
    """A worker is about to end.  kind: the name of the exception's class.

    num_tokens: of the step that the device had no room for, if that is why."""

    kind: str
    text: str
    num_tokens: int = 0

    @classmethod
    def of(cls, error: Exception) -> "WorkerFailed":
        """What a worker says of an exception."""
        num_tokens = error.num_tokens if isinstance(error, StepTooLarge) else 0
        return cls(kind=type(error).__name__, text=str(error), num_tokens=num_tokens)

    def error(self, name: str) -> CallboardError:
        """The error that the worker ``name`` has told."""
        if self.num_tokens:
            return StepTooLarge(self.text, self.num_tokens)
        known = TOLD_AS_THEMSELVES.get(self.kind)
        return known(self.text) if known is not None else EngineDied(f"{name} crashed: {self.kind}: {self.text}")


# ---- the frontend's process -> the engine --------------------------------------------------------


class FrontendDrained(Message, frozen=True, kw_only=True):
    """The answer to ``Drain``: no request comes after this."""


class FrontendState(Message, frozen=True, kw_only=True):
    """What the frontend wants to know again after it was lost, in its own words."""

    state: bytes


# ---- the engine -> the frontend's process --------------------------------------------------------


class Drain(Message, frozen=True, kw_only=True):
    """Take no more requests; those that are open go on."""


class AbortAll(Message, frozen=True, kw_only=True):
    """End every open request, and say that the server is shutting down."""


class EngineFailed(Message, frozen=True, kw_only=True):
    """An actor crashed, and this is all: end every open request with the reason."""

    reason: str


FromWorker = WorkerReady | WorkerAlive | WorkerFailed
# What each kind of worker says besides, and what it is told.
FromTokenizer = Admit | Abort | Deltas | Failed
FromFrontend = Tokenize | Abort | GetSnapshot | Subscribe | Profile | Operate | FrontendDrained | FrontendState
ToFrontend = IngressInbox | SettingsChanged | Drain | AbortAll | EngineFailed | Snapshot | RequestsFinished | Operated
ExecutorProcessInbox = ExecutorAssignment | ExecutorInbox | Stop
TokenizerProcessInbox = TokenizerAssignment | TokenizerInbox | Stop
FrontendProcessInbox = FrontendAssignment | ToFrontend | Stop
# Whatever crosses a queue, but for assignments.
AnyMessage = (
    SchedulerInbox | ExecutorInbox | TokenizerInbox | FromWorker | FromTokenizer | FromFrontend | ToFrontend | Stop
)
