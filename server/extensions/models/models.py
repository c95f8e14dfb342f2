"""All models of a server: which are loaded, which wait for room, which leave to make some.

Owns: loads, one task for each model; the budget of memory; times of idleness.
Does not know: processes (``model.py``), HTTP.
A model that a request runs on, or waits for, is never unloaded.  Of the others the one used longest ago goes first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from engine.actors.admission import RETRY_LATER_S
from engine.host.timeouts import is_set_within
from engine.types.errors import CallboardError, RequestError
from server.extensions.models.model import ModelReplica
from server.model_card import ANY_MODEL
from server.proxy.replica import Replica, State

log = logging.getLogger(__name__)

FAILED_FOR_S = 10.0  # requests get the reason of a failed load for so long before another one is tried


class Models:
    """Make the set of models.

    budget_bytes: for all that are loaded; 0 for no limit.  clock: seconds that only grow."""

    noun = "model"

    def __init__(
        self, models: Sequence[ModelReplica], budget_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.all = models
        self.num_open = 0
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._changed = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        for one in models:
            one.changed, one.bring = self._changed.set, self._bringing(one)

    def find(self, name: str | None) -> ModelReplica:
        """The model that is called so, or the first if none is meant.  Raises RequestError (404)."""
        for one in self.all:
            if name in (None, one.name):
                return one
        if name in ANY_MODEL:
            return self.all[0]
        names = ", ".join(f"'{one.name}'" for one in self.all)
        raise RequestError(
            f"the model '{str(name)[:100]}' does not exist; this server has {names}",
            status=404,
            code="model_not_found",
            param="model",
        )

    def lose(self, replica: Replica, reason: object, url: str = "") -> None:
        self.find(replica.name).lose(replica, reason, url)

    @contextmanager
    def wanted(self, model: ModelReplica) -> Iterator[None]:
        """Keep a model from being unloaded for as long as the context lasts."""
        self.num_open += 1
        self._idle.clear()
        model.num_wanted += 1
        if (timer := self._timers.pop(model.name, None)) is not None:
            timer.cancel()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()
            model.num_wanted -= 1
            if not model.num_wanted:
                model.last_used = self._clock()
                self._watch_idleness(model)
                self._changed.set()

    async def loaded(self, model: ModelReplica, within_s: float) -> None:
        """Wait until a model is loaded, and have it loaded if it is not.  Raises RequestError, a 503."""
        if model.is_ready:
            return
        done, _ = await asyncio.wait({self.bring(model)}, timeout=within_s)
        if model.is_ready:
            return
        if done and model.refusal is not None:
            raise model.refusal
        what = "waits for memory that other models use" if model.state is State.STOPPED else "is being loaded"
        raise RequestError(
            f"the model '{model.name}' {what}; send the request again",
            status=503,
            code="model_not_loaded",
            retry_after_s=RETRY_LATER_S,
        )

    def bring(self, model: ModelReplica) -> "asyncio.Task[None]":
        """Have a model loaded; returns the task that does it, of which there is one at a time."""
        task = self._loads.get(model.name)
        if task is None or task.done():
            task = self._loads[model.name] = asyncio.create_task(self._bring(model), name=f"load {model.name}")
        return task

    async def start(self) -> None:
        """Load those that are to be loaded at the start, one after another as long as there is room."""
        for one in self.all:
            if one.table.load == "start" and one.state is State.STOPPED:
                await asyncio.wait({self.bring(one)})  # which goes on for others if this is cancelled

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request is open, and load nothing more meanwhile; False if the time ran out first."""
        for one in self.all:
            one.server_leaves = True
        await is_set_within(timeout_s, self._idle)
        return not self.num_open

    async def stop(self) -> None:
        """End them all.  Requests that are open end with an error."""
        for one in self.all:
            one.server_leaves = True
        for timer in self._timers.values():
            timer.cancel()
        loads = [task for task in self._loads.values() if not task.done()]
        for task in loads:
            task.cancel()
        if loads:
            await asyncio.wait(loads)
        for one in self.all:
            if one.state in (State.READY, State.STARTING):
                one.unload()
        await asyncio.gather(*(one.unloaded() for one in self.all))

    def _bringing(self, model: ModelReplica) -> Callable[[], object]:
        return lambda: self.bring(model)

    async def _bring(self, model: ModelReplica) -> None:
        """Load a model unless it is there after all, or has failed a moment ago."""
        await model.settle()
        if model.is_ready or model.is_leaving:
            return
        async with self._claiming:
            if not await self._make_room(model):
                return
            loading = asyncio.ensure_future(model.load())  # it runs up to where its memory counts
            await asyncio.sleep(0)
        try:
            await loading
        except (CallboardError, OSError) as error:  # of the model, or of starting a process
            self._refuse(model, error)
        except asyncio.CancelledError:
            loading.cancel()
            with suppress(asyncio.CancelledError, CallboardError, OSError):
                await loading
            raise
        else:
            self._watch_idleness(model)
            await self._unload_idle(0, model)

    def _refuse(self, model: ModelReplica, error: Exception) -> None:
        log.error("%s cannot be loaded: %s", model.name, error)
        model.num_failures += 1
        model.refusal = RequestError(
            f"the model '{model.name}' cannot be loaded: {error}",
            status=503,
            code="model_failed",
            retry_after_s=round(FAILED_FOR_S),
        )

        def forget() -> None:
            model.refusal = None

        asyncio.get_running_loop().call_later(FAILED_FOR_S, forget)

    # ---- room -------------------------------------------------------------------------------

    async def _make_room(self, model: ModelReplica) -> bool:
        """Unload idle models until there is room for one, and wait for those that are in use.

        False if no request waits for it (any more): none leaves for that."""
        while not await self._unload_idle(model.num_bytes, model):
            if not model.num_wanted:
                log.warning("%s is not loaded: server.models_memory_mb has no room for it", model.name)
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _unload_idle(self, more_bytes: int, besides: ModelReplica) -> bool:
        """Unload idle models, as long as all and ``more_bytes`` do not fit.  Returns whether they do in the end.

        A model alone fits whatever its size."""
        while self._budget_bytes:
            others = [one for one in self.all if one is not besides and one.loaded_bytes]
            if not others or sum(one.loaded_bytes for one in self.all) + more_bytes <= self._budget_bytes:
                break
            idle = [one for one in others if one.is_ready and not one.num_wanted]
            if not idle or (more_bytes and not besides.num_wanted):
                return False
            oldest = min(idle, key=lambda one: one.last_used)
            oldest.unload()
            await oldest.unloaded()
        return True

    def _watch_idleness(self, model: ModelReplica) -> None:
        if model.table.unload_after_s and not model.num_wanted:
            loop = asyncio.get_running_loop()
            self._timers[model.name] = loop.call_later(model.table.unload_after_s, self._unload_by_time, model)

    def _unload_by_time(self, model: ModelReplica) -> None:
        if model.is_ready and not model.num_wanted and not model.server_leaves:
            model.unload()
            self._leaving[model.name] = asyncio.create_task(model.unloaded())
