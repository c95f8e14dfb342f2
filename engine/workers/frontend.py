"""The front desk: stands where ingress stands, while clients are served by a front in a process of its own.

consumes: Deltas, Failed (tokenizer) · EngineReady, EngineRecovering, Stats (scheduler) · Stop (system)
  TokenizersReady, TokenizersLost (tokenizer pool) · what the front says
produces: Tokenize, Abort (tokenizer) · all of the above, and answers (the front)
waits for: the front's loading and its end; never for a peer.   owns: which requests are open, as ids.

A front that dies, hangs or takes no more takes its clients with it: their connections end, and their requests are
aborted.  The next front is started on the same socket, where new clients wait meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

import msgspec

from engine.actors.actor import Actor
from engine.actors.ingress import Part
from engine.actors.mailbox import Link
from engine.actors.snapshot import RequestsFinished, Snapshot
from engine.errors import EngineDied
from engine.messages import (
    Abort,
    AbortAll,
    Ask,
    Deltas,
    Drain,
    EngineFailed,
    EngineReady,
    EngineRecovering,
    Failed,
    Finish,
    Follow,
    FrontAlive,
    FrontDrains,
    FrontKeeps,
    FrontOrder,
    FrontReady,
    FrontWord,
    Handover,
    IngressInbox,
    Stats,
    Tokenize,
    TokenizersLost,
    TokenizersReady,
)
from engine.plugins.hookspecs import hookimpl
from engine.scheduling.metrics import RequestMetrics
from engine.workers.group import Desk, Member, ProcessLost, Reports, Tenure, judge
from engine.workers.intensity import RestartIntensity
from engine.workers.wire import WireError

log = logging.getLogger(__name__)

FrontTold = IngressInbox | FrontOrder | Snapshot | RequestsFinished
Start = Callable[[str, Handover, Reports[FrontWord]], Member[FrontTold]]


class FrontCommand(msgspec.Struct, frozen=True):
    """What a front is: a module to run, and the descriptor of the socket that it listens on."""

    module: str
    listener: int


class _Follower:
    """An observer of the engine on the front's behalf."""

    def __init__(self, tell: Callable[[RequestsFinished], None]) -> None:
        self._tell = tell

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        self._tell(RequestsFinished(tuple(requests)))


class FrontDesk(Actor[IngressInbox]):
    """start: (name, handover, reports) -> a new process.  silence_timeout_s: one that says nothing for so long hangs.

    parts: what must say that it is ready, besides the front.  about: see ``Handover``; to be set before it runs."""

    def __init__(
        self,
        *,
        capacity: int,
        tokenizer: Link[Tokenize | Abort],
        start: Start,
        intensity: RestartIntensity,
        silence_timeout_s: float,
        parts: Iterable[Part] = ("executors",),
    ) -> None:
        super().__init__("front", capacity)
        self.about = b""
        self.num_restarts = 0
        self.became_ready = asyncio.Event()
        self.desk: Desk[FrontWord, FrontTold] = Desk("front")
        self._tokenizer = tokenizer
        self._start = start
        self._intensity = intensity
        self._silence_timeout_s = silence_timeout_s
        self._parts = tuple(parts)
        self._came: dict[Part, EngineReady | TokenizersReady] = {}
        self._lost: dict[Part, EngineRecovering | TokenizersLost] = {}
        self._stats: Stats | None = None
        self._open: set[int] = set()
        self._largest_id = 0
        self._kept = b""
        self._draining = self._has_drained = False
        self._idle = asyncio.Event()
        self._has_started = False
        self._is_following = False
        self._told_to_stop = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._settle()

    def connect(self, *, look: Callable[[Ask], Snapshot], watch: Callable[[object, str], None]) -> None:
        """What the front is answered from: a monitor, which needs this actor to be there first."""
        self._look = look
        self._watch = watch

    # ---- as ingress: for the supervisor and the server --------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that have come and not yet ended."""
        return len(self._open)

    @property
    def recovering(self) -> bool:
        """Whether a part was lost, and requests wait for it."""
        return bool(self._lost)

    @property
    def draining(self) -> bool:
        """Whether no more requests are taken.  Set it, and the front is told."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        if value and not self._draining:
            self._draining = True
            self._tell(Drain())
            self._settle()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open, and none can come where that was asked for; False if the time ran out."""
        if not self._idle.is_set():
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return not self._open
        return True

    def abort_all(self) -> None:
        """Cancel every open request; the front tells its clients."""
        self._tell(AbortAll())
        self._abort_open()

    def fail_all(self, error: EngineDied) -> None:
        """The engine is gone: the front tells its clients why, and ends."""
        self._tell(EngineFailed(str(error)))
        self._open.clear()
        self._told_to_stop.set()

    async def leave(self) -> None:
        """Let the front finish what it writes, and end; returns when nothing is left of it."""
        self._told_to_stop.set()
        if self._keeping is not None:
            await asyncio.wait((self._keeping,))

    # ---- from the engine --------------------------------------------------------------------

    def handle(self, message: IngressInbox) -> None:
        match message:
            case Deltas():
                for delta in message.deltas:
                    if delta.finish != Finish.RUNNING:
                        self._open.discard(delta.request_id)
            case Failed():
                self._open.discard(message.request_id)
            case Stats():
                self._stats = message
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
        self._tell(message)
        self._settle()

    def _has_come(self, part: Part, message: EngineReady | TokenizersReady) -> None:
        self._came[part] = message
        self._lost.pop(part, None)
        self._look_ready()

    def _look_ready(self) -> None:
        if self.desk.is_ready and all(part in self._came for part in self._parts):
            self.became_ready.set()

    def _tell(self, message: FrontTold) -> None:
        """To the front, if it is there: the next one gets a handover instead."""
        tenure = self.desk.tenure
        if tenure is None or not tenure.is_ready:
            return
        try:
            tenure.put(message)
        except WireError as error:
            if not isinstance(message, Deltas):
                raise
            self._tell_in_parts(message, error)

    def _tell_in_parts(self, message: Deltas, error: WireError) -> None:
        """What is too large for a frame is cut, and if it cannot be cut, it is its request's end and nobody else's."""
        if len(message.deltas) > 1:
            middle = len(message.deltas) // 2
            self._tell(Deltas(message.deltas[:middle]))
            self._tell(Deltas(message.deltas[middle:]))
            return
        (delta,) = message.deltas
        self._abort(Abort(delta.request_id))
        self._tell(Failed(delta.request_id, f"the output is too large: {error}", 413, "output_too_large"))

    # ---- from the front ---------------------------------------------------------------------

    def take(self, desk: Desk[FrontWord, FrontTold], message: FrontWord) -> None:
        """What the front says.  As with a message in the mailbox, what goes wrong here ends this actor."""
        try:
            self._take_word(message)
        except Exception as error:
            self._finish(error)

    def _take_word(self, message: FrontWord) -> None:
        match message:
            case Tokenize():
                self._open.add(message.request_id)
                self._largest_id = max(self._largest_id, message.request_id)
                self._idle.clear()
                self._tokenizer.put(message)
            case Abort():
                self._abort(message)
            case Ask():
                self._tell(self._look(message))
            case Follow():
                if not self._is_following:
                    self._is_following = True
                    self._watch(_Follower(self._tell), "the front")
            case FrontDrains():
                self._has_drained = True
            case FrontKeeps(what):
                self._kept = what
            case FrontReady():
                self._arrived()
            case FrontAlive():
                pass  # the desk's own business
            case _:
                assert_never(message)
        self._settle()

    def _abort(self, message: Abort) -> None:
        """Of those that are open; what has ended meanwhile needs no end."""
        if message.request_id in self._open:
            self._open.discard(message.request_id)
            self._tokenizer.put(message)

    def _arrived(self) -> None:
        log.info("the front is ready")
        self._has_started = True
        for message in self._news():
            self._tell(message)
        if self._draining:
            self._tell(Drain())
        self._look_ready()

    def _news(self) -> tuple[IngressInbox, ...]:
        """What brings a new ingress to where an old one would be."""
        stats = () if self._stats is None else (self._stats,)
        return (*self._came.values(), *self._lost.values(), *stats)

    def went(self, desk: Desk[FrontWord, FrontTold], loss: ProcessLost) -> None:
        """The front is gone, and with it everybody who would read an answer."""
        try:
            if self._open:
                log.warning("the front had %d requests, which are aborted", len(self._open))
            self._abort_open()
            self._settle()
        except Exception as error:
            self._finish(error)

    def _abort_open(self) -> None:
        for request_id in sorted(self._open):
            self._tokenizer.put(Abort(request_id))
        self._open.clear()
        self._settle()

    def _settle(self) -> None:
        """Look whether ``wait_idle`` may go on."""
        may_come = self._draining and not self._has_drained and self.desk.is_ready
        if self._open or may_come:
            self._idle.clear()
        else:
            self._idle.set()

    # ---- the front's life -------------------------------------------------------------------

    async def run(self) -> None:
        """Handle messages until Stop, with a front at the desk.  It outlives a crash, to tell its clients.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        self._keeping = asyncio.create_task(self._keep(), name="front.keep")
        await super().run()
        await self.leave()

    async def _keep(self) -> None:
        """One process after the other."""
        try:
            while (loss := await self._fill()) is not None and not self._draining:
                judge(loss, has_started=self._has_started, intensity=self._intensity)
                self.num_restarts += 1
                log.warning("%s; it is restarted (%d so far)", loss, self.num_restarts)
        except Exception as error:
            self._finish(error)

    async def _fill(self) -> ProcessLost | None:
        """One process, from its start to its end."""
        tenure = Tenure(self, self.desk, self._silence_timeout_s)
        handover = Handover(self._largest_id + 1, self._news(), self.about, self._kept)
        return await tenure.hold(lambda reports: self._start(self.desk.name, handover, reports), self._told_to_stop)
