"""The process of the frontend: ``python -m server.run.frontend_process``, which the engine starts.

Owns: HTTP and ingress in a process of their own, from the ticket to the exit code; what the engine's monitor has been
asked from here and has not answered.  Does not know: restarts, signals; what is drained, and when, is the engine's to
say.  It imports no torch.
"""

import asyncio
import gc
import itertools
import random
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from engine.actors.actor import Actor, Link
from engine.actors.admission import RETRY_LATER_S
from engine.actors.ingress import Ingress
from engine.actors.operations import Operated
from engine.actors.snapshot import NO_VIEWS, GetSnapshot, RequestsFinished, Snapshot, Subscribe, Views
from engine.messages import Abort, Failed, Stop, Tokenize
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.plugins.parsers import plugin_codec
from engine.types.errors import CallboardError, EngineDied, RequestError
from engine.types.notices import Profile
from engine.workers.child import Ticket, enter
from engine.workers.main import Outgoing, WorkerProcess
from engine.workers.messages import (
    AbortAll,
    Drain,
    EngineFailed,
    FrontendAssignment,
    FrontendDrained,
    FrontendProcessInbox,
    FrontendState,
    WorkerReady,
)
from engine.workers.wire import WireError
from server.backend import Backend
from server.clients import CacheSalts
from server.model_card import ModelCard
from server.run.app import create_runner
from server.run.kept import Kept
from server.run.operations import RemoteOperations

MAX_ASKED = 64  # without an answer; more would only wait behind them
CAPACITY = 1 << 18  # of the link, in messages: of as many requests as may be open at most, four each


class FrontendKept(msgspec.Struct, frozen=True):
    """The state that the next frontend gets of this one.  salts: see ``CacheSalts``.  parts: see ``Kept``."""

    salts: bytes = b""
    parts: dict[str, bytes] = {}


class RemoteMonitor:
    """A ``Monitor`` of another process.  ingress: this process's, for its own part.  decode: token ids as text."""

    def __init__(
        self,
        engine: Link[GetSnapshot | Subscribe | Profile],
        ingress: Ingress,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.decode = decode
        self._engine = engine
        self._ingress = ingress
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Snapshot]] = {}
        self._observers: Observers | None = None

    async def look(
        self, *, meter: bool = False, board: bool = False, views: Views = NO_VIEWS, patience_s: float = 1.0
    ) -> Snapshot:
        """Returns what the engine's own monitor sees.  Raises RequestError: 503 if it does not answer in time."""
        if len(self._asked) >= MAX_ASKED:
            raise _silent()
        number = next(self._numbers)
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._engine.put(GetSnapshot(number=number, meter=meter, board=board, views=dict(views)))
            async with asyncio.timeout(patience_s):
                snapshot = await answer
        except TimeoutError:
            raise _silent() from None
        finally:
            del self._asked[number]
        ingress = self._ingress
        gauges = structs.replace(
            snapshot.gauges,
            num_open=ingress.num_open,
            num_late_events=ingress.num_late_events,
            recovering=ingress.recovering,
        )
        return structs.replace(snapshot, gauges=gauges)

    def watch(self, observer: object, name: str) -> None:
        """Call the hooks of ``observer`` for requests that end from now on."""
        if self._observers is None:
            self._observers = Observers(Plugins({}), {}, page_size=0)
            self._engine.put(Subscribe())
        self._observers.add(observer, name)

    def profile(self, ask: Profile) -> None:
        """Have the engine's executors record steps, or stop it."""
        self._engine.put(ask)

    def take(self, message: Snapshot | RequestsFinished) -> None:
        """Take a message of the engine."""
        if isinstance(message, RequestsFinished):
            if self._observers is not None:
                self._observers.request_finished(message.requests)
        elif (answer := self._asked.get(message.number)) is not None and not answer.done():
            answer.set_result(message)


def _silent() -> RequestError:
    return RequestError("the engine does not answer", status=503, code="engine_silent", retry_after_s=RETRY_LATER_S)


def main() -> None:
    """Serve, and end with the process's exit code."""
    enter(lambda ticket: FrontendProcess(ticket).run())


class FrontendProcess(WorkerProcess[FrontendAssignment]):
    """An ingress actor with HTTP around it, and the link that stands for the engine."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket, assignment=FrontendAssignment, accepts=FrontendProcessInbox, capacity=CAPACITY)

    async def build(self, assignment: FrontendAssignment, outgoing: Outgoing) -> Ingress:
        """Returns ingress, with HTTP listening: only now, when it knows what the one before it knew."""
        config, handover = assignment.config, assignment.handover
        codec = await asyncio.to_thread(plugin_codec, config, Path(config.model.path))
        card = msgspec.msgpack.decode(handover.about, type=ModelCard)
        engine = EngineLink(outgoing)
        self._outgoing = outgoing
        self._ingress = ingress = Ingress(
            capacity=assignment.capacity,
            limits=config.limits,
            max_model_len=assignment.max_len,
            vocab_size=assignment.vocab_size,
            rng=random.Random(config.device.seed or None),
            tokenizer=engine,
            parts=("executors", "tokenizers") if assignment.has_tokenizers else ("executors",),
            first_id=handover.first_id,
            use=card.use,
        )
        engine.connect(ingress)
        self._monitor = RemoteMonitor(outgoing, ingress, codec.decode)
        self._operations = RemoteOperations(outgoing)
        kept = self._kept = (
            msgspec.msgpack.decode(handover.state, type=FrontendKept) if handover.state else FrontendKept()
        )
        self._runner = create_runner(
            config.server,
            config.limits,
            Backend(ingress, self._monitor, card, codec, self._operations),
            CacheSalts(config.server, kept=kept.salts, keep=lambda what: self._keep(salts=what)),
            Kept(kept.parts, lambda parts: self._keep(parts=parts)),
            storage=config.storage,
        )
        for message in handover.replay:
            ingress.handle(message)
        gc.collect()
        gc.freeze()  # what loading has left lives as long as the process
        listener = socket.socket(fileno=assignment.listener)
        listener.setblocking(False)
        await self._runner.listen(listener)
        outgoing.put(WorkerReady())
        return ingress

    def _keep(self, **changed: Any) -> None:
        self._kept = structs.replace(self._kept, **changed)
        self._outgoing.put(FrontendState(state=msgspec.msgpack.encode(self._kept)))

    def deliver(self, actor: Actor[Any], message: Any) -> None:
        """Hand a message of the engine to ingress, or to what else it is for."""
        match message:
            case Snapshot() | RequestsFinished():
                self._monitor.take(message)
            case Operated():
                self._operations.take(message)
            case Drain():
                self._ingress.drain()
                self._outgoing.put(FrontendDrained())
            case AbortAll():
                self._ingress.abort_all()
            case EngineFailed(reason=reason):
                self._ingress.fail_all(EngineDied(reason))
            case Stop():
                actor.spawn(self._close(actor))
            case _:
                actor.inbox.put(message)

    async def _close(self, actor: Actor[Any]) -> None:
        """End the connections, then ingress, through which the last output goes."""
        await self._runner.cleanup()
        actor.inbox.put(Stop())


class EngineLink:
    """The link that ingress puts its requests into.  A request that is too large for a frame fails alone."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing

    def connect(self, ingress: Ingress) -> None:
        """Set ingress, which needs this link to be built first, and takes such failures."""
        self._ingress = ingress

    def put(self, message: Tokenize | Abort) -> None:
        """Send a message to the engine."""
        try:
            self._outgoing.link.put(message)
        except WireError as error:
            reason = f"the request is too large: {error}"
            self._ingress.inbox.put(
                Failed(request_id=message.request_id, message=reason, status=413, code="request_too_large")
            )
        except CallboardError as error:
            self._outgoing.fail(error)


if __name__ == "__main__":
    main()
