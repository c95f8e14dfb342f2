"""The engine's side of ingress when a frontend process serves the clients.

consumes: Deltas, Failed (tokenizer) · EngineReady, EngineRecovering, Stats (scheduler) · Stop (system)
  TokenizersReady, TokenizersLost (tokenizer pool) · messages of the frontend
produces: Tokenize, Abort (tokenizer) · all of the above, and answers (the frontend)
waits for: the frontend's loading and its end; never for a peer.   owns: the ids of open requests.

When a frontend dies, hangs or accepts no messages, its clients' connections end with it and their requests are
aborted.  The next frontend is started on the same socket, where new clients wait meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import assert_never

import msgspec

from engine.actors.actor import Actor, Link
from engine.actors.inboxes import IngressInbox
from engine.actors.ingress import Part
from engine.actors.operations import Operate, Operated, SettingsChanged
from engine.actors.snapshot import GetSnapshot, RequestsFinished, Snapshot, Subscribe
from engine.host.timeouts import is_set_within
from engine.messages import Abort, Deltas, Failed, Finish, Tokenize
from engine.plugins.hookspecs import hookimpl
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import EngineDied
from engine.types.notices import EngineReady, EngineRecovering, Profile, Stats, TokenizersLost, TokenizersReady
from engine.workers.group import Owner, WorkerGroup, WorkerSlot, one_for_one
from engine.workers.limits import Patience, RestartIntensity
from engine.workers.messages import (
    AbortAll,
    Drain,
    EngineFailed,
    FromFrontend,
    FrontendDrained,
    FrontendState,
    Handover,
    ToFrontend,
    WorkerReady,
)
from engine.workers.wire import WireError, in_parts
from engine.workers.worker import Reports, Worker, WorkerLost

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0  # to import a few libraries and to read a tokenizer
FrontendSlot = WorkerSlot[FromFrontend, ToFrontend]
StartFrontend = Callable[[FrontendSlot, Reports[FromFrontend], Handover], Worker[ToFrontend]]


class FrontendCommand(msgspec.Struct, frozen=True):
    """The command of a frontend: a module to run, and the descriptor of the socket that it listens on."""

    module: str
    listener: int


class _Subscription:
    """An observer of the engine for the frontend."""

    def __init__(self, send: Callable[[RequestsFinished], None]) -> None:
        self._send = send

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        self._send(RequestsFinished(requests=tuple(requests)))


class RemoteIngress(Actor[IngressInbox | SettingsChanged], Owner[FromFrontend, ToFrontend]):
    """The actor in place of ingress, which forwards to the frontend process.

    start: starts a frontend's process.  silence_timeout_s: one that sends nothing for longer hangs.
    parts: the parts that must report ready, besides the frontend.
    about: as in ``Handover``."""

    def __init__(
        self,
        *,
        capacity: int,
        tokenizer: Link[Tokenize | Abort],
        start: StartFrontend,
        intensity: RestartIntensity,
        silence_timeout_s: float,
        parts: Iterable[Part] = ("executors",),
    ) -> None:
        super().__init__("frontend", capacity)
        self.about = b""
        self.became_ready = asyncio.Event()
        self._tokenizer = tokenizer
        self._group = WorkerGroup[FromFrontend, ToFrontend](
            self,
            ["frontend"],
            one_for_one,
            lambda: nullcontext(lambda slot, reports: start(slot, reports, self._handover())),
            intensity=intensity,
            patience=Patience(silence_s=silence_timeout_s, first_load_s=LOAD_TIMEOUT_S),
        )
        (self.slot,) = self._group.slots
        self._parts = tuple(parts)
        self._came: dict[Part, EngineReady | TokenizersReady] = {}
        self._lost: dict[Part, EngineRecovering | TokenizersLost] = {}
        self._stats: Stats | None = None
        self._settings: SettingsChanged | None = None
        self._open: set[int] = set()
        self._largest_id = 0
        self._state = b""
        self._draining = self._has_drained = False
        self._idle = asyncio.Event()
        self._is_subscribed = False
        self._keeping: asyncio.Task[None] | None = None
        self._settle()

    def connect(
        self,
        *,
        look: Callable[[GetSnapshot], Snapshot],
        watch: Callable[[object, str], None],
        profile: Callable[[Profile], None],
    ) -> None:
        """Set the sources of answers to the frontend: a monitor, which needs this actor and is built later."""
        self._look = look
        self._watch = watch
        self._profile = profile

    def connect_operations(self, about: bytes, operate: Callable[[Operate, Callable[[Operated], None]], None]) -> None:
        """Set what a server brings before this actor runs.  about: as in ``Handover``.

        operate: executes an operator's command and answers it."""
        self.about, self._operate = about, operate

    # ---- as ingress: for the supervisor and the server --------------------------------------

    @property
    def num_restarts(self) -> int:
        """Restarts of frontends."""
        return self._group.num_restarts

    @property
    def num_open(self) -> int:
        """Requests that have arrived and not yet ended."""
        return len(self._open)

    @property
    def recovering(self) -> bool:
        """Whether a part was lost, so that requests wait for it."""
        return bool(self._lost)

    @property
    def draining(self) -> bool:
        """Whether no more requests are accepted."""
        return self._draining

    def drain(self) -> None:
        """Accept no more requests; the frontend is notified."""
        if not self._draining:
            self._draining = True
            self._send(Drain())
            self._settle()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open, and none can arrive if draining; return False on a timeout."""
        return await is_set_within(timeout_s, self._idle) or not self._open

    def abort_all(self) -> None:
        """Cancel every open request; the frontend answers its clients."""
        self._send(AbortAll())
        self._abort_open()

    def fail_all(self, error: EngineDied) -> None:
        """Send the reason to the frontend, which ends its clients' requests and itself, after the engine died."""
        self._send(EngineFailed(reason=str(error)))
        self._open.clear()
        self._group.stop()

    async def leave(self) -> None:
        """Let the frontend finish its writes and end; returns when it is gone."""
        self._group.stop()
        if self._keeping is not None:
            await asyncio.wait((self._keeping,))

    # ---- from the engine --------------------------------------------------------------------

    def handle(self, message: IngressInbox | SettingsChanged) -> None:
        match message:
            case Deltas():
                for delta in message.deltas:
                    if delta.finish != Finish.RUNNING:
                        self._open.discard(delta.request_id)
            case Failed():
                self._open.discard(message.request_id)
            case Stats():
                self._stats = message
            case SettingsChanged():
                self._settings = message
                self.about = message.about or self.about
            case EngineReady():
                self._has_come("executors", message)
            case TokenizersReady():
                self._has_come("tokenizers", message)
            case EngineRecovering():
                self._lost["executors"] = message
            case TokenizersLost():
                self._lost["tokenizers"] = message
            case _:
                assert_never(message)
        self._send(message)
        self._settle()

    def _has_come(self, part: Part, message: EngineReady | TokenizersReady) -> None:
        self._came[part] = message
        self._lost.pop(part, None)
        self._look_ready()

    def _look_ready(self) -> None:
        if self.slot.is_ready and all(part in self._came for part in self._parts):
            self.became_ready.set()

    def _send(self, message: ToFrontend) -> None:
        """Send to the frontend, if it is ready; a later one gets a handover instead."""
        if not self.slot.is_ready:
            return
        try:
            self.slot.put(message)
        except WireError as error:
            if not isinstance(message, Deltas):
                raise
            for part in in_parts(message, error):
                self._abort(part) if isinstance(part, Abort) else self._send(part)

    # ---- from the frontend ---------------------------------------------------------------------

    def take(self, slot: FrontendSlot, message: FromFrontend) -> None:
        match message:
            case Tokenize():
                self._open.add(message.request_id)
                self._largest_id = max(self._largest_id, message.request_id)
                self._idle.clear()
                self._tokenizer.put(message)
            case Abort():
                self._abort(message)
            case GetSnapshot():
                self._send(self._look(message))
            case Subscribe():
                if not self._is_subscribed:
                    self._is_subscribed = True
                    self._watch(_Subscription(self._send), "the frontend")
            case Profile():
                self._profile(message)
            case Operate():
                self._operate(message, self._send)
            case FrontendDrained():
                self._has_drained = True
            case FrontendState(state=state):
                self._state = state
            case _:
                assert_never(message)
        self._settle()

    def _abort(self, message: Abort) -> None:
        """Abort a request if it is open; it may have ended meanwhile."""
        if message.request_id in self._open:
            self._open.discard(message.request_id)
            self._tokenizer.put(message)

    def on_ready(self, slots: Sequence[FrontendSlot], ready: Sequence[WorkerReady]) -> None:
        """Send a loaded frontend what it has missed since its handover."""
        for message in self._replay():
            self._send(message)
        if self._draining:
            self._send(Drain())
        self._look_ready()
        self._settle()

    def _replay(self) -> tuple[IngressInbox | SettingsChanged, ...]:
        """Return the messages that bring a new ingress to the state of the old one."""
        latest = (one for one in (self._stats, self._settings) if one is not None)
        return (*self._came.values(), *self._lost.values(), *latest)

    def _handover(self) -> Handover:
        return Handover(first_id=self._largest_id + 1, replay=self._replay(), about=self.about, state=self._state)

    def on_lost(self, slots: Sequence[FrontendSlot], loss: WorkerLost) -> None:
        """Abort the requests of a lost frontend, whose clients are gone with it."""
        if self._open:
            log.warning("the frontend had %d requests, which are aborted", len(self._open))
        self._abort_open()
        if self._draining:  # no new clients are accepted: no other frontend is needed
            self._group.stop()

    def _abort_open(self) -> None:
        for request_id in sorted(self._open):
            self._tokenizer.put(Abort(request_id=request_id))
        self._open.clear()
        self._settle()

    def _settle(self) -> None:
        """Set or clear the event of ``wait_idle``."""
        may_come = self._draining and not self._has_drained and self.slot.is_ready
        if self._open or may_come:
            self._idle.clear()
        else:
            self._idle.set()

    # ---- the frontend's life -------------------------------------------------------------------

    async def run(self) -> None:
        """Handle messages until Stop, and keep a frontend running, which outlives a crash to answer its clients.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        self._keeping = asyncio.create_task(self._keep(), name="frontend.keep")
        await super().run()
        await self.leave()

    async def _keep(self) -> None:
        try:
            await self._group.run()
        except Exception as error:
            self._finish(error)
