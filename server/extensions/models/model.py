"""One of several models: its process, and what is known of it while it has none.

Owns: the model's state, and its process as a group of one worker.
Does not know: when it is loaded or unloaded, and what wants it (``models.py``); what requests say.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from engine.config import Config
from engine.host.memory import resident_bytes
from engine.messages import Stop
from engine.types.errors import CallboardError, RequestError
from engine.workers.child import Child
from engine.workers.group import Owner, WorkerGroup, WorkerSlot, one_for_one
from engine.workers.limits import Patience, RestartIntensity
from engine.workers.messages import WorkerReady
from engine.workers.placement import assignment_basics, start_child
from engine.workers.worker import Reports, Worker, WorkerLost
from server.extensions.models.configuration import ServedModel
from server.extensions.models.model_process import CAPACITY, ModelAssignment, ModelLoaded
from server.http.listener import bind, url_of
from server.model_card import ModelCard
from server.proxy.replica import Replica, State, unavailable

log = logging.getLogger(__name__)

MODULE = "server.extensions.models.model_process"
LOOPBACK = "127.0.0.1"
END_TIMEOUT_S = 10.0  # for a process that was stopped, with nothing open
# A connection that broke may be that of a process that has just died, which the kernel reports a moment later.
DEATH_SHOWS_WITHIN_S = 0.5
WEIGHTS = (".safetensors", ".gguf")


class ModelReplica(Replica, Owner[ModelLoaded, Stop]):
    """A model that is loaded (READY), being loaded (STARTING), being unloaded (DRAINING) or not loaded (STOPPED).

    num_wanted: requests that run, or wait for the load.  last_used: when the last of them ended.
    card: as of the last load.  refusal: of requests for a while, since it could not be loaded.
    changed: called when it has become another state.  bring: called to have it loaded.  Both are set by its owner.
    pid: of its last process."""

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
        self._group: WorkerGroup[ModelLoaded, Stop] | None = None
        self._running: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()
        self.pid = 0
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
        self._loaded.clear()
        self._group = WorkerGroup[ModelLoaded, Stop](
            self,
            [self.name],
            one_for_one,
            lambda: nullcontext(self._start),
            intensity=RestartIntensity(0, math.inf),  # the next request loads it again, if there is room
            patience=Patience(silence_s=self._config.placement.silence_timeout_s),
        )
        running = self._running = asyncio.create_task(self._group.run(), name=f"process of {self.name}")
        running.add_done_callback(self._ended)
        loaded = asyncio.create_task(self._loaded.wait())
        self._set(State.STARTING)
        try:
            await asyncio.wait((running, loaded), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loaded.cancel()
            if not self._loaded.is_set():
                self._group.stop()
                await self.unloaded()
        if self._loaded.is_set():
            self.load_s = self._clock() - started
            return
        try:
            running.result()
        except CallboardError as error:
            raise CallboardError(str(error).replace(str(self._path), self.name)) from None

    def _start(self, slot: WorkerSlot[ModelLoaded, Stop], reports: Reports[ModelLoaded]) -> Worker[Stop]:
        with bind(LOOPBACK, 0) as listener:
            number, url = listener.fileno(), url_of(listener)
            worker = start_child(
                slot,
                reports,
                assignment=ModelAssignment(**assignment_basics(self._config, CAPACITY), listener=number),
                module=MODULE,
                where="unix",
                accepts=ModelLoaded,
                capacity=CAPACITY,
                keep=(number,),
                end_timeout_s=END_TIMEOUT_S,
            )
        assert isinstance(worker.process, Child)
        self.url, self.pid = url, worker.process.pid
        log.info("process %d loads %s", self.pid, self.name)
        return worker

    def unload(self) -> None:
        """Let its process end, which gives back all of its memory; ``unloaded`` waits for that."""
        assert self._group is not None
        assert not self.num_wanted or self.server_leaves, f"{self.name} is in use"
        log.info("%s is unloaded: it takes %d MB", self.name, self.num_bytes >> 20)
        self._set(State.DRAINING)
        self._group.stop()

    async def unloaded(self) -> None:
        """Wait until it has no process."""
        if self._running is not None:
            await asyncio.wait((self._running,))

    async def settle(self) -> None:
        """Wait until it is known whether its process runs: of one that was lost or is being ended."""
        if self._running is None:
            return
        if self.state is State.DRAINING:
            await self.unloaded()
        elif self.state is State.STARTING:
            await asyncio.wait((self._running,), timeout=DEATH_SHOWS_WITHIN_S)
            if not self._running.done():
                self._set(State.READY)

    # ---- as the owner of its process --------------------------------------------------------

    def take(self, slot: WorkerSlot[ModelLoaded, Stop], message: ModelLoaded) -> None:
        """Keep the card of the model that has been loaded."""
        self.card = message.card

    def on_ready(self, slots: Sequence[WorkerSlot[ModelLoaded, Stop]], ready: Sequence[WorkerReady]) -> None:
        """Take requests: the process answers."""
        self.num_loads += 1
        self.last_used = self._clock()
        self._loaded.set()
        self._set(State.READY)

    def on_lost(self, slots: Sequence[WorkerSlot[ModelLoaded, Stop]], loss: WorkerLost) -> None:
        """Take no requests: the process has died, or does not answer and is killed."""
        if not self._loaded.is_set():
            return
        if self.state is State.READY:
            log.error("%s; the next request loads it again", loss)
            self.num_lost += 1
        self._set(State.DRAINING)

    def _ended(self, running: "asyncio.Task[None]") -> None:
        if not running.cancelled():
            running.exception()  # of a loss, which ``on_lost`` has logged, or of the load, which raises it
        self.url = ""
        self._set(State.STOPPED)

    @property
    def num_bytes(self) -> int:
        """The memory that it takes while it is loaded: as configured, or else as measured, or else the size of its
        weights."""
        if self.table.memory_mb:
            return self.table.memory_mb << 20
        now = resident_bytes(self.pid) if self._running is not None and not self._running.done() else 0
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

    def _set(self, state: State) -> None:
        self.state = state
        self.changed()


def _for_process(config: Config) -> Config:
    """Returns the configuration of the model's process.  What a client may have in all, the front counts; and it
    drains, so what is open when a process is stopped ends at once."""
    limits = msgspec.structs.replace(
        config.limits, requests_per_minute=0, tokens_per_minute=0, max_requests_per_client=0
    )
    server = msgspec.structs.replace(config.server, host=LOOPBACK, port=0, drain_timeout_s=0.0)
    return msgspec.structs.replace(config, limits=limits, server=server)


def _weights_bytes(path: Path) -> int:
    """Returns the size of a checkpoint on this machine; 0 for others."""
    files = path.iterdir() if path.is_dir() else (path,)
    return sum(one.stat().st_size for one in files if one.suffix in WEIGHTS and one.is_file())
