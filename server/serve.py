"""The life of the server: listen, serve, drain, stop.

Owns: signals and the order of shutting down.  Does not know: routes; how the engine is built or stopped.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from engine.config import LimitsSection, ServerSection
from engine.text.codec import TextCodec
from engine.workers.frontend import RemoteIngress
from server.app import create_runner
from server.backend import Entrance, Ingress, Monitor
from server.listener import BACKLOG
from server.model_card import ModelCard

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED_EXIT_CODE = 130


async def serve(
    server: ServerSection,
    limits: LimitsSection,
    ingress: Ingress,
    card: ModelCard,
    monitor: Monitor,
    *,
    listener: socket.socket,
    engine: "asyncio.Future[None]",
    codec: TextCodec | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT, or the end of ``engine`` (the task that runs it), whatever comes first.

    A signal: new requests get 503 while open ones go on for up to ``drain_timeout_s``; then they end with an error.
    A SIGINT after that, until the event loop is closed: the process exits at once with code 130.  Another SIGTERM says
    nothing new: whoever stops a group of processes may reach this one twice.
    The engine's failure: open requests were ended by it; clients are told, then its exception is raised here.
    """
    told_to_stop = _listen_for_signals()
    runner = create_runner(server, limits, ingress, card, monitor, codec)
    try:
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        log.info("listening on %s", runner.addresses[0])
        await _either(told_to_stop.wait(), engine)
        if told_to_stop.is_set() and not engine.done():
            await _drain(server, ingress, engine)
    finally:
        await runner.cleanup()
    if engine.done():
        engine.result()


async def serve_from_process(
    server: ServerSection, ingress: RemoteIngress, *, listener: socket.socket, engine: "asyncio.Future[None]"
) -> None:
    """The same while a process of its own has the connections: it is told, and ends before this returns."""
    told_to_stop = _listen_for_signals()
    try:
        await _either(told_to_stop.wait(), engine)
        if told_to_stop.is_set() and not engine.done():
            await _drain(server, ingress, engine)
    finally:
        await ingress.leave()
        listener.close()  # nobody accepts on it any more
    if engine.done():
        engine.result()


def _listen_for_signals() -> asyncio.Event:
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _on_signal, number, told_to_stop)
    return told_to_stop


async def _drain(server: ServerSection, ingress: Entrance, engine: "asyncio.Future[None]") -> None:
    log.info("draining: %d requests are open, up to %g s", ingress.num_open, server.drain_timeout_s)
    ingress.draining = True
    await _either(ingress.wait_idle(server.drain_timeout_s), engine)
    if ingress.num_open:
        log.warning("draining: %d requests end unfinished", ingress.num_open)
        ingress.abort_all()


async def _either(event: Coroutine[Any, Any, bool], engine: "asyncio.Future[None]") -> None:
    """Wait for the event or the end of the engine; the engine goes on."""
    task = asyncio.create_task(event)
    waited_for: set[asyncio.Future[Any]] = {task, engine}
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()


def _on_signal(number: signal.Signals, told_to_stop: asyncio.Event) -> None:
    if told_to_stop.is_set() and number == signal.SIGINT:
        # Not an exception: it would have to find its way through whatever is being waited for.
        os._exit(INTERRUPTED_EXIT_CODE)
    told_to_stop.set()
