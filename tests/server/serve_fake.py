"""A process that serves the fake engine, for tests that need signals and exit codes.

Arguments: JSON with ``server`` settings, ``delay_s`` between tokens, ``ready``, and ``die_after_s``.
Prints the port once the socket listens.
"""

import asyncio
import json
import sys

import msgspec
import uvloop

from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import CallboardError, EngineDied
from server.backend import Backend
from server.http.listener import bind
from server.run.serve import serve
from tests.server.fake_ingress import FakeIngress
from tests.server.fake_monitor import FakeMonitor
from tests.server.live_server import CARD


async def run_engine(ingress: FakeIngress, die_after_s: float) -> None:
    await asyncio.sleep(die_after_s)
    error = EngineDied("executor crashed: ZeroDivisionError: division by zero")
    ingress.fail_all(error)
    raise error


async def main(options: dict) -> None:
    server = msgspec.convert({"host": "127.0.0.1", "port": 0, **options.get("server", {})}, ServerSection)
    listener = bind(server.host, server.port)
    print(listener.getsockname()[1], flush=True)
    ingress = FakeIngress(delay_s=options.get("delay_s", 0.0))
    ingress.ready = options.get("ready", True)
    engine = asyncio.create_task(run_engine(ingress, options.get("die_after_s", 3600)))
    backend = Backend(ingress, FakeMonitor(ingress), CARD)
    await serve(server, LimitsSection(), backend, listener=listener, engine=engine, reload=lambda: None)


if __name__ == "__main__":
    try:
        uvloop.run(main(json.loads(sys.argv[1])))
    except CallboardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
