"""Workers in processes of their own: the assignment of each kind, and how it is started.

Owns: the assignments, the addresses of links, what the ranks of one generation share.
Does not know: restarts, the effects of a loss.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from engine.actors.inboxes import ExecutorInbox, FromExecutor, TokenizerInbox
from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.fingerprint import fingerprint
from engine.config import Config, without_cluster_key
from engine.host.logs import LogSettings
from engine.plugins.families import read_model
from engine.types.errors import ConfigError
from engine.types.notices import Message
from engine.workers.child import Child, Ticket
from engine.workers.executors import GenerationSettings
from engine.workers.frontend import FrontendCommand, FrontendSlot, StartFrontend
from engine.workers.group import Start, WorkerSlot
from engine.workers.keys import ClientKeys
from engine.workers.link import LinkServer
from engine.workers.linked_worker import END_TIMEOUT_S, LinkedWorker, Process, StartProcess
from engine.workers.messages import (
    ExecutorAssignment,
    FromFrontend,
    FromTokenizer,
    FromWorker,
    FrontendAssignment,
    Handover,
    Place,
    ToFrontend,
    TokenizerAssignment,
)
from engine.workers.socket_directory import Rendezvous
from engine.workers.worker import Reports, Worker

BEATS = 4  # heartbeats of a worker within the limit of silence
RANK_CAPACITY = 64  # messages of a rank's link; with two steps in flight a handful are in transit
STEPS_BEHIND = 4096  # a busy process that lags by the output of more steps is given up


def start_child(
    slot: WorkerSlot[Any, Any],
    reports: Reports[Any],
    *,
    assignment: Message,
    module: str,
    where: str,
    accepts: Any,
    capacity: int,
    keep: tuple[int, ...] = (),
    place: Place | None = None,
    end_timeout_s: float = END_TIMEOUT_S,
    elsewhere: StartProcess | None = None,
) -> LinkedWorker[Any, Any]:
    """Start a worker in a child of this process.  Raises ConfigError or LinkError if its link cannot be made.

    module: the module that it runs.  where: an address for its link, as in ``placement.link``.
    accepts: its messages, without ``FromWorker``.  capacity: messages of the link.
    keep: descriptors that it inherits.  place: as in ``Ticket``.  elsewhere: starts it instead of a child."""
    return LinkedWorker(
        slot.name,
        assignment,
        reports,
        lambda deliver: LinkServer(slot.name, where, accepts | FromWorker, deliver, capacity=capacity),
        elsewhere
        or (
            lambda endpoint, keys, ended: Child(
                module, Ticket(slot.number, slot.name, endpoint, keys, os.getpid(), place), ended, keep
            )
        ),
        end_timeout_s=end_timeout_s,
    )


def _any_port(where: str) -> str:
    """Return ``where`` for one of several links: each needs a port of its own."""
    return f"{where.rpartition(':')[0]}:0" if where.startswith("tcp") else where


def _require_linux(setting: str, other: str) -> None:
    if sys.platform != "linux":
        raise ConfigError(f"placement.{setting}: worker processes need Linux; use {other} on this system")


class Machines(Protocol):
    """The machines that run the ranks of one engine.  join_timeout_s: how long ranks elsewhere may take to come.

    is_draining: set by the server; no request is taken any more."""

    join_timeout_s: float
    is_draining: Callable[[], bool]

    @property
    def where(self) -> str:
        """The address at which links of ranks elsewhere listen, as in ``placement.link``."""
        ...

    def new_rendezvous(self) -> str:
        """A URL at which the ranks of one generation form their group."""
        ...

    def place(self, rank: int) -> Place | None:
        """The place of a rank on this machine, or None if it is elsewhere."""
        ...

    def start(self, rank: int, endpoint: str, keys: ClientKeys, ended: Callable[..., None]) -> Process:
        """Start the process of a rank that is elsewhere; see ``StartProcess``."""
        ...


class ProcessExecutors:
    """Executors in processes of their own.

    max_len: longest sequence.  capacity: of an executor's mailbox.  num_ranks: tensor-parallel size.
    module: the module of a rank's process.  machines: None if all ranks are on this one.
    given: see ``RankContext``.
    """

    can_kill = True

    def __init__(
        self,
        *,
        config: Config,
        max_len: int,
        num_ranks: int,
        capacity: int,
        progress: bool,
        module: str = "engine.workers.executor_main",
        machines: Machines | None = None,
        given: dict[str, bytes] | None = None,
    ) -> None:
        _require_linux("executor=process", "'inline'")
        self.silence_s = config.placement.silence_timeout_s
        self.join_s = machines.join_timeout_s if machines is not None else 0.0
        self._config = without_cluster_key(config)
        self._max_len = max_len
        self._num_ranks = num_ranks
        self._capacity = capacity
        self._progress = progress
        self._module = module
        self._machines = machines
        self._given = given or {}

    @contextmanager
    def generation(self, settings: GenerationSettings) -> Iterator[Start[FromExecutor, ExecutorInbox]]:
        link, machines = self._config.placement.link, self._machines
        if machines is not None:
            assignment = self._assignment(settings, machines.new_rendezvous())
            yield lambda slot, reports: self._start_on(machines, slot, reports, assignment)
            return
        rendezvous = Rendezvous(self._num_ranks, link)
        assignment = self._assignment(settings, rendezvous.url)
        where = link if self._num_ranks == 1 else _any_port(link)
        try:
            yield lambda slot, reports: self._start(slot, reports, assignment, where)
        finally:
            rendezvous.end()

    def _start_on(
        self,
        machines: Machines,
        slot: WorkerSlot[FromExecutor, ExecutorInbox],
        reports: Reports[FromExecutor],
        assignment: ExecutorAssignment,
    ) -> Worker[ExecutorInbox]:
        if (place := machines.place(slot.number)) is not None:
            return self._start(slot, reports, assignment, "unix", place=place)
        return self._start(slot, reports, assignment, machines.where, elsewhere=partial(machines.start, slot.number))

    def _start(
        self,
        slot: WorkerSlot[FromExecutor, ExecutorInbox],
        reports: Reports[FromExecutor],
        assignment: ExecutorAssignment,
        where: str,
        **options: Any,
    ) -> Worker[ExecutorInbox]:
        return start_child(
            slot,
            reports,
            assignment=self._of_rank(assignment, slot.number),
            module=self._module,
            where=where,
            accepts=FromExecutor,
            capacity=RANK_CAPACITY,
            **options,
        )

    def _assignment(self, settings: GenerationSettings, rendezvous: str) -> ExecutorAssignment:
        """Return the assignment that the ranks of a generation share."""
        config = self._config
        path = resolve_checkpoint(config.model.path, config.model.revision)
        config = structs.replace(config, model=structs.replace(config.model, path=str(path)))
        return ExecutorAssignment(
            **assignment_basics(config, self._capacity),
            rank=0,
            num_ranks=self._num_ranks,
            rendezvous=rendezvous,
            num_pages=settings.num_pages,
            most_tokens=settings.most_tokens,
            max_len=self._max_len,
            progress=self._progress,
            given=self._given,
            fingerprint=""
            if self._machines is None
            else fingerprint(read_model(path, config.plugins, config.model), config.model.load_format),
        )

    @staticmethod
    def _of_rank(assignment: ExecutorAssignment, rank: int) -> ExecutorAssignment:
        """Return one rank's assignment: rank 0 shows progress, and has read the checkpoint that others compare."""
        if not rank:
            return structs.replace(assignment, fingerprint="")
        return structs.replace(assignment, rank=rank, progress=False)


def process_tokenizers(*, config: Config, capacity: int) -> Start[FromTokenizer, TokenizerInbox]:
    """Return the function that starts tokenizers.  config: with the model's path resolved."""
    _require_linux("tokenizers", "0")
    capacity += STEPS_BEHIND  # for the link as well, which holds messages that the mailbox has not received
    return partial(
        start_child,
        assignment=TokenizerAssignment(**assignment_basics(config, capacity)),
        module="engine.workers.tokenizer_main",
        where=_any_port(config.placement.link),
        accepts=FromTokenizer,
        capacity=capacity,
    )


def process_frontend(
    *, config: Config, command: FrontendCommand, max_len: int, vocab_size: int, capacity: int
) -> StartFrontend:
    """Return the function that starts frontends.  config: with the model's path resolved.  capacity: of its mailbox."""
    _require_linux("ingress", "'inline'")
    capacity += STEPS_BEHIND  # as for a tokenizer

    def start(slot: FrontendSlot, reports: Reports[FromFrontend], handover: Handover) -> Worker[ToFrontend]:
        assignment = FrontendAssignment(
            **assignment_basics(config, capacity),
            max_len=max_len,
            vocab_size=vocab_size,
            has_tokenizers=config.placement.tokenizers > 0,
            listener=command.listener,
            handover=handover,
        )
        return start_child(
            slot,
            reports,
            assignment=assignment,
            module=command.module,
            where=_any_port(config.placement.link),
            accepts=FromFrontend,
            capacity=capacity,
            keep=(command.listener,),
            # Its last clients may be as slow to read as any others.
            end_timeout_s=config.server.client_timeout_s + END_TIMEOUT_S,
        )

    return start


def assignment_basics(config: Config, capacity: int) -> dict[str, Any]:
    """Return the fields of every ``Assignment``."""
    heartbeat_s = config.placement.silence_timeout_s / BEATS
    return {"config": config, "capacity": capacity, "heartbeat_s": heartbeat_s, "logs": LogSettings.here()}
