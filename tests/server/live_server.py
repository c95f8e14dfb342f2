"""The HTTP server on a real socket, in a thread of its own, so that tests may block."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import openai

from engine.features.pooling.checkpoint import Pooling
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from engine.text.codec import Formats, TextCodec
from server.backend import Backend
from server.http.listener import bind
from server.model_card import ModelCard
from server.run.app import create_runner
from tests.closing_loop import ClosingLoop
from tests.pace import far
from tests.plugins.model_outputs import tool_format
from tests.server.fake_ingress import FakeIngress
from tests.server.fake_monitor import FakeMonitor

T = TypeVar("T")
MODEL = "fake/model-1"
CARD = ModelCard(
    name=MODEL, max_model_len=1024, vocab_size=1000, created=1_700_000_000, about="a toy", use=Pooling().use
)


class LiveServer:
    """A context manager: listens inside of it.  ``ingress`` may be touched through ``call`` only."""

    def __init__(
        self,
        ingress: FakeIngress | None = None,
        *,
        server: ServerSection | None = None,
        limits: LimitsSection | None = None,
        storage: StorageSection | None = None,
        card: ModelCard = CARD,
        tool_parser: str = "hermes",
    ) -> None:
        self.ingress = FakeIngress() if ingress is None else ingress
        self._server = ServerSection() if server is None else server
        self._limits = LimitsSection() if limits is None else limits
        self._storage = StorageSection() if storage is None else storage
        self._codec = TextCodec.without_tokenizer(lambda _: Formats(tool_parser, tool_format(tool_parser)))
        self.monitor = FakeMonitor(self.ingress)
        self.backend = Backend(self.ingress, self.monitor, card, self._codec)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-server")
        self.loop_errors: list[dict[str, Any]] = []

    def __enter__(self) -> "LiveServer":
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread.start()
        assert self._started.wait(far(10)), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(far(20))
        assert not self._thread.is_alive(), "the server did not stop"
        assert not self.loop_errors, self.loop_errors

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(far(10))

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Poll a condition on the server's loop."""

        async def poll() -> bool:
            deadline = self._loop.time() + far(timeout_s)
            while not condition():
                if self._loop.time() > deadline:
                    return False
                await asyncio.sleep(0.01)
            return True

        return asyncio.run_coroutine_threadsafe(poll(), self._loop).result(far(timeout_s) + 10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=ClosingLoop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        self._stopping = asyncio.Event()
        self.runner = create_runner(self._server, self._limits, self.backend, storage=self._storage)
        await self.runner.listen(self._listener)
        self._started.set()
        await self._stopping.wait()
        self.ingress.abort_all()
        await self.runner.cleanup()


def connect(live: LiveServer, key: str = "none", retries: int = 0) -> openai.OpenAI:
    """Returns the official client of a server."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=retries)
