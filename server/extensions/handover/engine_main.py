"""One engine of a split engine, as a process: ``python -m server.extensions.handover.engine_main``.

Owns: its life.  It reads its configuration from standard input, writes its address to standard output, and ends when
its input does.
"""

import asyncio
import os
import sys
import threading

import msgspec
import uvloop

from engine.config import Config, build_config
from engine.control.system import System
from server.backend import Backend
from server.extensions.handover.processes import EngineStart
from server.extensions.replicas.held import HELD, HeldPrompts, reporting
from server.extensions.replicas.secret import require_secret
from server.http.listener import bind, url_of
from server.model_card import ModelCard
from server.run.app import create_runner
from server.run.extension import described

LOOPBACK = "127.0.0.1"


async def serve(start: EngineStart) -> None:
    """Serve until standard input ends, or the engine."""
    config = build_config(Config(), msgspec.json.decode(start.config))
    system = System(config)
    held = system.watchers[HELD] = HeldPrompts()
    card = ModelCard.of(system, config.server, described(system))
    backend = Backend(system.ingress, system.monitor, card, system.codec)
    guard = reporting(held, require_secret(start.digest))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_watch_input, args=(loop, ended), name="input", daemon=True).start()
    with bind(LOOPBACK, 0) as listener:
        runner = create_runner(config.server, config.limits, backend, guard=guard)
        await runner.listen(listener)
        print(url_of(listener), flush=True)
        await system.start()
        waiting, ending = asyncio.ensure_future(system.wait()), asyncio.ensure_future(ended.wait())
        await asyncio.wait({waiting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await system.stop(0.0)
        ending.cancel()
        await waiting


def _watch_input(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    sys.stdin.buffer.read()
    loop.call_soon_threadsafe(ended.set)


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)))
    sys.stdout.flush()
    os._exit(0)
