"""The life of the server: listen, serve, drain, stop.

Owns: signals and the order of shutting down.  Does not know: routes; how the engine is built or stopped.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from engine.actors.supervisor import Entrance
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from engine.workers.frontend import RemoteIngress
from server.backend import Backend
from server.run.app import NO_STORAGE, create_runner

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED_EXIT_CODE = 130


async def serve(
    server: ServerSection,
    limits: LimitsSection,
    backend: Backend,
    *,
    listener: socket.socket,
    engine: "asyncio.Future[None]",
    reload: Callable[[], None],
    storage: StorageSection = NO_STORAGE,
) -> None:
    """Serve until SIGTERM, SIGINT, or the end of ``engine`` (the task that runs it), whatever comes first.

    A signal: new requests get 503 while open ones go on for up to ``drain_timeout_s``; then they end with an error.
    A SIGINT after that, until the event loop is closed: the process exits at once with code 130.  Another SIGTERM says
    nothing new: stopping a group of processes may reach this one twice.
    A SIGHUP calls ``reload``, which cuts no stream; nor does a terminal that closes.
    The engine's failure: open requests were ended by it; their clients get the error, then it is raised here.
    """
    stop_requested = listen_for_signals(reload)
    runner = create_runner(server, limits, backend, storage=storage)
    try:
        await runner.listen(listener)
        await _serve_and_drain(server, backend.ingress, engine, stop_requested)
    finally:
        await runner.cleanup()
    if engine.done():
        engine.result()


async def serve_from_process(
    server: ServerSection,
    ingress: RemoteIngress,
    *,
    listener: socket.socket,
    engine: "asyncio.Future[None]",
    reload: Callable[[], None],
) -> None:
    """Serve as ``serve`` does while a process of its own has the connections; that ends before this returns."""
    stop_requested = listen_for_signals(reload)
    try:
        await _serve_and_drain(server, ingress, engine, stop_requested)
    finally:
        await ingress.leave()
        listener.close()  # that process has ended
    if engine.done():
        engine.result()


def listen_for_signals(reload: Callable[[], None]) -> asyncio.Event:
    """Returns what SIGTERM and SIGINT set.  reload: called at a SIGHUP."""
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _on_signal, number, stop_requested)
    loop.add_signal_handler(signal.SIGHUP, reload)
    return stop_requested


async def _serve_and_drain(
    server: ServerSection, ingress: Entrance, engine: "asyncio.Future[None]", stop_requested: asyncio.Event
) -> None:
    await _either(stop_requested.wait(), engine)
    if engine.done():
        return
    log.info("draining: %d requests are open, up to %g s", ingress.num_open, server.drain_timeout_s)
    ingress.drain()
    await _either(ingress.wait_idle(server.drain_timeout_s), engine)
    if ingress.num_open:
        log.warning("draining: %d requests end unfinished", ingress.num_open)
        ingress.abort_all()


async def _either(event: Coroutine[Any, Any, bool], engine: "asyncio.Future[None]") -> None:
    """Wait for the event or the end of the engine, without ending the engine."""
    task = asyncio.create_task(event)
    waited_for: set[asyncio.Future[Any]] = {task, engine}
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()


def _on_signal(number: signal.Signals, stop_requested: asyncio.Event) -> None:
    if stop_requested.is_set() and number == signal.SIGINT:
        # Not an exception: it would have to find its way through whatever is being waited for.
        os._exit(INTERRUPTED_EXIT_CODE)
    stop_requested.set()
