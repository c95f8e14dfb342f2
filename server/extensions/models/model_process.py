"""The process of one of several models: ``python -m server.extensions.models.model_process``, which the front starts.

Owns: an engine and its HTTP, from the assignment to the exit code.
Does not know: the other models, what it is wanted for, signals, which are the front's.
"""

import asyncio
import gc
import logging
import socket

from engine.actors.actor import Actor
from engine.control.system import System
from engine.messages import Stop
from engine.types.notices import Message
from engine.workers.child import Ticket, enter
from engine.workers.main import Outgoing, WorkerProcess
from engine.workers.messages import Assignment, WorkerReady
from server.backend import Backend
from server.http import exchange
from server.http.connection import HttpRunner
from server.model_card import ModelCard
from server.run.app import create_runner
from server.run.extension import described

CAPACITY = 16  # messages of the link and of the mailbox: its reports, and Stop


class ModelAssignment(Assignment, frozen=True, kw_only=True):
    """The first message to a model's process.  listener: the inherited descriptor of its socket."""

    listener: int


class ModelLoaded(Message, frozen=True, kw_only=True):
    """A model is loaded, and its server answers."""

    card: ModelCard


def main() -> None:
    """Serve, and end with the process's exit code."""
    enter(lambda ticket: ModelProcess(ticket).run())


class ModelProcess(WorkerProcess[ModelAssignment]):
    """An engine with HTTP around it, as a worker of the front."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket, assignment=ModelAssignment, accepts=ModelAssignment | Stop, capacity=CAPACITY)

    async def build(self, assignment: ModelAssignment, outgoing: Outgoing) -> "ModelServer":
        """Return the model, loaded and listening.  Raises CallboardError."""
        logging.getLogger(exchange.__name__).setLevel(logging.WARNING)  # the front's log has a line for each request
        config = assignment.config
        system = System(config)
        card = ModelCard.of(system, config.server, described(system))
        server = config.server.without_tls  # the front has the certificate
        runner = create_runner(server, config.limits, Backend(system.ingress, system.monitor, card, system.codec))
        listener = socket.socket(fileno=assignment.listener)
        listener.setblocking(False)
        await runner.listen(listener)
        await system.start()
        gc.collect()
        gc.freeze()  # what loading has left lives as long as the process
        outgoing.put(ModelLoaded(card=card))
        outgoing.put(WorkerReady())
        return ModelServer(system, runner)


class ModelServer(Actor[Stop]):
    """The actor around an engine and its HTTP: it ends on Stop, with what is open then, or with the engine."""

    def __init__(self, system: System, runner: HttpRunner) -> None:
        super().__init__("model", CAPACITY)
        self._system = system
        self._runner = runner

    async def run(self) -> None:
        """Serve until the end.  Raises EngineDied."""
        stopped, system = asyncio.Event(), self._system
        self.inbox.open(lambda messages: stopped.set())
        engine, stopping = asyncio.create_task(system.wait()), asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((engine, stopping), return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
        finally:
            engine.cancel()
            stopping.cancel()
            system.entrance.drain()
            system.entrance.abort_all()
            await self._runner.cleanup()
            await system.stop()


if __name__ == "__main__":
    main()
