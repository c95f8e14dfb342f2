"""The HTTP server with a real engine behind it, in a thread, so that tests may block."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.config import Config, build_config
from engine.control.system import System
from server.backend import Backend
from server.http.listener import bind
from server.model_card import ModelCard
from server.run.app import create_runner
from server.run.extension import described
from tests.closing_loop import ClosingLoop
from tests.pace import far


class EngineServer:
    """A context manager: serves inside of it.  sections: configuration tables.  guard: as in ``create_runner``."""

    def __init__(self, **sections: dict[str, Any]) -> None:
        self.config = build_config(Config(), {"device": {"kind": "cpu", "seed": 1}, **sections})
        self.system = System(self.config)
        self.model = self.system.model_name
        self.guard: Middleware | None = None
        self._failure: Exception | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-server")

    def __enter__(self) -> "EngineServer":
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread.start()
        assert self._started.wait(far(60)), "the engine did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(far(60))
        assert not self._thread.is_alive(), "the engine did not stop"

    def call(self, function: Callable[[], None]) -> None:
        """Run a plain function on the server's loop."""
        self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=ClosingLoop) as runner:
                runner.run(self._serve())
        except Exception as error:  # raised again in the test
            self._failure = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        system, config = self.system, self.config
        card = ModelCard(
            name=system.model_name,
            max_model_len=system.max_len,
            vocab_size=system.spec.vocab_size,
            created=1_700_000_000,
            tool_parser=system.codec.formats.tool_parser,
            template_variables=config.server.allowed_template_variables,
            use=system.spec.use,
            template_roles=system.codec.roles,
            parts=described(system),
        )
        await system.start()
        backend = Backend(system.ingress, system.monitor, card, system.codec)
        runner = create_runner(config.server, config.limits, backend, guard=self.guard)
        await runner.setup()
        await web.SockSite(runner, self._listener, backlog=1024).start()
        self._started.set()
        await self._stopping.wait()
        await runner.cleanup()
        await system.stop()
