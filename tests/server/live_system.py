"""A whole engine behind the HTTP server on a real socket, in a thread of its own, so that tests may block."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from engine.actors.snapshot import Gauges
from engine.config import Config, ConfigSource
from engine.control.system import System
from server.backend import Backend
from server.http.listener import bind
from server.model_card import ModelCard
from server.run.app import create_runner
from server.run.extension import described
from server.run.operations import LocalOperations
from tests.closing_loop import ClosingLoop
from tests.pace import far
from tests.server.http_client import Reply, ask

T = TypeVar("T")
MODEL = "tested"


class LiveSystem:
    """A context manager: serves inside of it.  build: makes the system, on its own thread.  source: of settings.

    At the end no request may be open, and no page in use."""

    def __init__(
        self, config: Config, build: Callable[[Config], System] = System, source: ConfigSource | None = None
    ) -> None:
        self._config = config
        self._source = source or ConfigSource()
        self._build = build
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-system")
        self._failure: BaseException | None = None

    def __enter__(self) -> "LiveSystem":
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._thread.start()
        self._started.wait(far(60))
        if self._failure is not None:
            self._listener.close()
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            assert self.wait_until(lambda gauges: gauges.num_open == 0 and gauges.pages_used == 0, 5), self.gauges()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(far(30))
        assert not self._thread.is_alive(), "the server did not stop"

    def complete(self, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        """One request on a connection of its own."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        return ask(self.port, "POST", "/v1/completions", body, headers)

    def complete_all(self, requests: Iterable[dict[str, Any]], concurrency: int) -> list[Reply]:
        """Many, so many at a time; replies in the order of the requests."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda fields: self.complete(**fields), requests))

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(far(10))

    def gauges(self) -> Gauges:
        return self.call(lambda: self.system.monitor.gauges())

    def wait_until(self, condition: Callable[[Gauges], bool], timeout_s: float) -> bool:
        """Poll the gauges on the server's loop."""

        async def poll() -> bool:
            deadline = self._loop.time() + far(timeout_s)
            while not condition(self.system.monitor.gauges()):
                if self._loop.time() > deadline:
                    return False
                await asyncio.sleep(0.002)
            return True

        return asyncio.run_coroutine_threadsafe(poll(), self._loop).result(far(timeout_s) + 10)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=ClosingLoop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self.system = self._build(self._config)
        card = ModelCard(
            name=MODEL,
            max_model_len=self.system.max_len,
            vocab_size=self.system.spec.vocab_size,
            created=0,
            parts=described(self.system),
        )
        config = self._config
        self.operations = LocalOperations(self.system, self._source, card)
        self.runner = create_runner(
            config.server,
            config.limits,
            Backend(self.system.ingress, self.system.monitor, card, operations=self.operations),
        )
        await self.system.start()
        await self.runner.setup()
        await web.SockSite(self.runner, self._listener, backlog=2048).start()
        self._started.set()
        await self._stopping.wait()
        await self.runner.cleanup()
        await self.system.stop()
