"""The process of one of several models: ``python -m server.extensions.models.model_process``, which the front starts.

Owns: an engine and its HTTP, from the ticket to the exit code; the one report that the front gets.
Does not know: the other models, what it is wanted for.
Signals are the front's: it closes this process's standard input, and what is still open then ends with an error.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import threading

import msgspec
import uvloop

from engine.config import Config, build_config
from engine.control.system import System
from engine.host.logs import LogSettings
from engine.types.errors import CallboardError
from engine.workers.child import begin, die_with, end, wait_for_end
from server.backend import Backend
from server.http import exchange
from server.model_card import ModelCard
from server.run.app import create_runner

log = logging.getLogger(__name__)


class ModelTicket(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The start of a process.

    config: as JSON.  listener, report: descriptors of a socket that listens and of a pipe.  parent: to die with."""

    config: bytes
    listener: int
    report: int
    parent: int
    logs: LogSettings


class Report(msgspec.Struct, frozen=True):
    """The outcome of the load.  card: of the model that is ready.  failure: why there is none."""

    card: ModelCard | None = None
    failure: str = ""


def main() -> None:
    """Serve until the front lets go, and end with the process's exit code."""
    ticket = begin(ModelTicket)
    die_with(ticket.parent)
    config = build_config(Config(), msgspec.json.decode(ticket.config))
    ticket.logs.apply(config.model.name)
    logging.getLogger(exchange.__name__).setLevel(logging.WARNING)  # the front's log has a line for each request
    end(uvloop.run(_serve(ticket, config)))


async def _serve(ticket: ModelTicket, config: Config) -> int:
    let_go = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        wait_for_end(sys.stdin.fileno())
        loop.call_soon_threadsafe(let_go.set)

    threading.Thread(target=wait, name="front-watch", daemon=True).start()
    engine = asyncio.create_task(_run(ticket, config))
    leaving = asyncio.create_task(let_go.wait())
    await asyncio.wait({engine, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not engine.done():
        engine.cancel()  # a load goes on in its thread, and ends with the process
        await asyncio.wait({engine})
    try:
        engine.result()
    except asyncio.CancelledError:
        return 0
    except CallboardError as error:
        log.error("%s", error)
        _report(ticket, Report(failure=str(error)))
        return error.exit_code
    return 0


async def _run(ticket: ModelTicket, config: Config) -> None:
    """Load the model, say so, and serve it until the engine ends.  Raises CallboardError."""
    system = System(config)
    card = ModelCard.of(system, config.server)
    server = config.server.without_tls  # the front has the certificate
    runner = create_runner(server, config.limits, Backend(system.ingress, system.monitor, card, system.codec))
    with socket.socket(fileno=ticket.listener) as listener:
        listener.setblocking(False)
        await runner.listen(listener)
        try:
            await system.start()
            # What loading has left lives as long as the process: the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            _report(ticket, Report(card))
            await system.wait()
        finally:
            system.entrance.drain()
            system.entrance.abort_all()
            await runner.cleanup()
            await system.stop()


def _report(ticket: ModelTicket, report: Report) -> None:
    """Send the report to the front, once; a later failure is in the log."""
    try:
        os.write(ticket.report, msgspec.json.encode(report) + b"\n")
    except BrokenPipeError:
        return  # the front has had its report


if __name__ == "__main__":
    main()
