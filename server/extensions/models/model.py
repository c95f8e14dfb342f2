"""One of several models: its process, and what is known of it while it has none.

Owns: how the process is started, found dead and ended; the model's state.
Does not know: when it is loaded or unloaded, and what wants it (``models.py``); what requests say.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.config import Config, ServedModel
from engine.host.logs import LogSettings
from engine.host.memory import resident_bytes
from engine.types.errors import CallboardError, RequestError
from engine.workers.child import Child
from server.extensions.models.model_process import ModelTicket, Report
from server.http.listener import bind, url_of
from server.model_card import ModelCard
from server.proxy.replica import Replica, State, unavailable

log = logging.getLogger(__name__)

MODULE = "server.extensions.models.model_process"
LOOPBACK = "127.0.0.1"
END_TIMEOUT_S = 10.0  # for a process that was let go of, with nothing open
# A connection that broke may be that of a process that has just died, which the kernel reports a moment later.
DEATH_SHOWS_WITHIN_S = 0.5
WEIGHTS = (".safetensors", ".gguf")


class Model(Replica):
    """A model that is loaded (READY), being loaded (STARTING), being unloaded (DRAINING) or not loaded (STOPPED).

    num_wanted: requests that run, or wait for the load.  last_used: when the last of them ended.
    card: as of the last load.  refusal: of requests for a while, since it could not be loaded.
    changed: called when it has become another state.  bring: called to have it loaded.  Both are set by its owner."""

    def __init__(self, served: ServedModel, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(served.table.name, state=State.STOPPED)
        self.table = served.table
        self.card: ModelCard | None = None
        self.refusal: RequestError | None = None
        self.changed: Callable[[], None] = lambda: None
        self.bring: Callable[[], object] = lambda: None
        self.server_leaves = False
        self.num_resumed = 0
        self.num_wanted = 0
        self.num_loads = 0
        self.num_failures = 0
        self.load_s = 0.0
        self.last_used = 0.0
        self._clock = clock
        self._path = Path(served.config.model.path)
        self._config = _for_process(served.config)
        self._child: Child | None = None
        self._ended_because = ""
        self._measured = 0

    @property
    def is_leaving(self) -> bool:
        """Whether no request need wait for it to be loaded."""
        return self.server_leaves or self.refusal is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent to it."""
        return self.state is State.READY

    # ---- its process ------------------------------------------------------------------------

    async def load(self) -> None:
        """Start its process, and wait until that is ready.  Raises CallboardError, with the reason, if it ends."""
        started = self._clock()
        reading, writing = os.pipe()
        try:
            with bind(LOOPBACK, 0) as listener:
                url = url_of(listener)
                ticket = ModelTicket(self._config, listener.fileno(), writing, os.getpid(), LogSettings.here())
                self._child = child = Child(
                    MODULE, ticket, lambda reason: self._ended(child, reason), (listener.fileno(), writing)
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._set(State.STARTING)
        log.info("process %d loads %s", child.pid, self.name)
        try:
            report = await _report(reading)
        except BaseException:
            child.kill()
            raise
        if report.card is None:
            if not await child.wait(END_TIMEOUT_S):
                child.kill()
                await child.wait(END_TIMEOUT_S)
            reason = report.failure or f"its process {self._ended_because}"
            raise CallboardError(reason.replace(str(self._path), self.name))
        self.card, self.url = report.card, url
        self.num_loads += 1
        self.load_s = self._clock() - started
        self.last_used = self._clock()
        if child.alive:
            self._set(State.READY)
            log.info("%s is ready after %.1f s", self.name, self.load_s)

    def unload(self) -> None:
        """Let its process end, which gives back all of its memory; ``unloaded`` waits for that."""
        assert self._child is not None
        assert not self.num_wanted or self.server_leaves, f"{self.name} is in use"
        log.info("%s is unloaded: it takes %d MB", self.name, self.num_bytes >> 20)
        self._set(State.DRAINING)
        self._child.let_go()

    async def unloaded(self) -> None:
        """Wait until it has no process."""
        if self._child is not None and not await self._child.wait(END_TIMEOUT_S):
            log.warning("%s does not end by itself", self.name)
            self._child.kill()
            await self._child.wait(END_TIMEOUT_S)

    async def settle(self) -> None:
        """Wait until it is known whether its process runs: of one that was lost or is being ended."""
        if self._child is None or self.state is State.READY:
            return
        if self.state is State.DRAINING:
            await self.unloaded()
        elif self.state is State.STARTING and not await self._child.wait(DEATH_SHOWS_WITHIN_S):
            self._set(State.READY)

    @property
    def num_bytes(self) -> int:
        """The memory that it takes while it is loaded: as configured, or else as measured, or else the size of its
        weights."""
        if self.table.memory_mb:
            return self.table.memory_mb << 20
        now = resident_bytes(self._child.pid) if self._child is not None and self._child.alive else 0
        if self.state is State.READY:
            self._measured = now
        return max(now, self._measured or _weights_bytes(self._path))

    @property
    def loaded_bytes(self) -> int:
        """The memory that it takes now."""
        return self.num_bytes if self.state is not State.STOPPED else 0

    # ---- as requests are sent to it ---------------------------------------------------------

    def choose(self, blocks: list[bytes], besides: list[Replica]) -> Replica:
        """Itself.  Raises RequestError, a 503, while it is not loaded, and if it has been tried; then it is loaded."""
        if self.state is State.READY and not besides:
            return self
        self.bring()
        raise unavailable(f"the model '{self.name}' was lost; it is being loaded again", "model_lost")

    def lose(self, replica: Replica, reason: object, url: str = "") -> None:
        """Find out whether its process has died, and load it again if it has."""
        if self.state is State.READY and url in ("", self.url):
            log.warning("%s is lost: %s", self.name, reason)
            self.num_lost += 1
            self._set(State.STARTING)
            self.bring()

    def _ended(self, child: Child, reason: str) -> None:
        if child is not self._child:
            return
        self._ended_because = reason
        if self.state is State.READY:
            log.error("%s: its process %s; the next request loads it again", self.name, reason)
            self.num_lost += 1
        self.url = ""
        self._set(State.STOPPED)

    def _set(self, state: State) -> None:
        self.state = state
        self.changed()


async def _report(pipe: int) -> Report:
    """Returns the report of the process at the other end of a pipe, which is closed then; an empty report if it ends
    before."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    return msgspec.json.decode(line, type=Report) if line else Report()


def _for_process(config: Config) -> bytes:
    """The configuration of the model's process, as JSON.  What a client may have in all, the front counts; and it
    drains, so what is open when a process is let go of ends at once."""
    limits = msgspec.structs.replace(
        config.limits, requests_per_minute=0, tokens_per_minute=0, max_requests_per_client=0
    )
    server = msgspec.structs.replace(config.server, host=LOOPBACK, port=0, drain_timeout_s=0.0)
    return msgspec.json.encode(msgspec.structs.replace(config, limits=limits, server=server))


def _weights_bytes(path: Path) -> int:
    """Returns the size of a checkpoint on this machine; 0 for others."""
    files = path.iterdir() if path.is_dir() else (path,)
    return sum(one.stat().st_size for one in files if one.suffix in WEIGHTS and one.is_file())
