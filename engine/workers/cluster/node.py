"""A node: the small process that lends one rank of another machine's engine an executor here.

Owns: that executor's life, generation after generation, and its own end.
Does not know: requests, steps, other nodes; why a generation begins or ends.
It waits for the head's notice, starts the executor of its rank when a generation begins, ends it when the generation is
over, and so on until the head says that all is done, or says nothing any more.
"""

import asyncio
import contextlib
import logging
import os
import queue
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.config import Config
from engine.host.timeouts import is_set_within
from engine.types.errors import CallboardError, ConfigError, EngineDied, WeightsError
from engine.workers.child import Child, Ticket
from engine.workers.cluster.environment import Cluster
from engine.workers.cluster.polling import Polling
from engine.workers.cluster.store import ClusterStore, Forged, NodeStatus, Notice, link_keys, our_release, shortened
from engine.workers.group import TICKS, Watch
from engine.workers.messages import Place

log = logging.getLogger(__name__)

PAUSE_S = 0.25  # between looks at the store
KNOCK_S = 0.5  # between looks for the store itself
KILL_TIMEOUT_S = 10.0
SAY_TIMEOUT_S = 1.0
LEAVE_GRACE_S = 2.0  # told to end: for the head to say that it ends as well
MOST_EVENTS = 1024  # of the thread and of timers, a few a second, while one of them is dealt with
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class View:
    """What a look at the store shows.  notice: None if there is none, or only one that is not the head's.
    got_place: in its generation, if that is a new one: whether the rank's place there was free."""

    beats: int
    notice: Notice | None
    is_forged: bool
    got_place: bool | None


class Node:
    """module: what the rank's process runs.  Where the checkpoint is a hub's, this waits for its download."""

    def __init__(self, cluster: Cluster, config: Config, module: str = "engine.workers.executor_main") -> None:
        self._cluster = cluster
        self._config = config
        self._module = module
        self._name = f"rank {cluster.rank}"
        self._store: ClusterStore | None = None
        self._polling: Polling | None = None
        self._words: queue.SimpleQueue[NodeStatus] = queue.SimpleQueue()
        self._said = asyncio.Event()
        self._events: asyncio.Queue[Callable[[], Coroutine[Any, Any, bool]]] = asyncio.Queue(MOST_EVENTS)
        self._watch = Watch(0, TICKS)
        self._beats: int | None = None
        self._has_met = False
        self._notice: Notice | None = None
        self._looked_at = ""  # the generation that the thread has tried to join
        self._place = Place(cluster.local_rank)
        self._unfit: WeightsError | None = None  # raised once the head can be told as well
        try:
            path = str(resolve_checkpoint(config.model.path, config.model.revision))
            self._place = Place(cluster.local_rank, path, config.model.tokenizer)
        except WeightsError as error:
            self._unfit = error
        self._nonce = ""
        self._child: Child | None = None
        self._told_to_end = False

    async def run(self) -> None:
        """Serve one rank until the head is done, or SIGTERM or SIGINT comes.

        Raises ConfigError or WeightsError if this machine does not fit the head's, EngineDied if the head has failed,
        is gone, or has not been found within placement.join_timeout_s."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        timer = asyncio.create_task(self._keep_time())
        try:
            await self._reach()
            while True:
                handle = await self._events.get()
                if await handle():
                    return
        except _ToldToEnd:
            return
        except CallboardError as error:
            await self._end_child_silently()
            await self._say("unfit" if isinstance(error, ConfigError | WeightsError) else "left", str(error))
            raise
        finally:
            timer.cancel()
            await self._end_child()
            if self._polling is not None:
                self._polling.end()

    # ---- finding the head -------------------------------------------------------------------

    async def _reach(self) -> None:
        """Wait for the store's port, so that torch need not complain of every attempt."""
        cluster, timeout_s = self._cluster, self._config.placement.join_timeout_s
        log.info("%s of %d waits for rank 0 at %s", self._name, cluster.size, cluster.store)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._knock():
                    await asyncio.sleep(KNOCK_S)
                    if self._told_to_end:
                        raise _ToldToEnd
        except TimeoutError:
            raise EngineDied(f"{self._name}: nobody listens at {cluster.store} since {timeout_s:g} s") from None
        asyncio.get_running_loop().call_later(timeout_s, self._check_met, timeout_s)
        self._polling = Polling("node", self._open_cluster_store, self._look, self._store_gone, pause_s=PAUSE_S)
        self._polling.start()

    async def _knock(self) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self._cluster.host, self._cluster.port), KNOCK_S)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    def _check_met(self, timeout_s: float) -> None:
        if not self._has_met:
            self._post(
                partial(self._give_up, f"rank 0 has not shown itself at {self._cluster.store} in {timeout_s:g} s")
            )

    # ---- on the thread ----------------------------------------------------------------------

    def _open_cluster_store(self) -> None:
        # Its C++ half would write a page of addresses whenever the head goes away.
        is_ours = CPP_LOG_LEVEL not in os.environ
        os.environ.setdefault(CPP_LOG_LEVEL, "ERROR")
        from engine.plugins.support.rendezvous import join_store  # torch is needed from here on

        if is_ours:
            del os.environ[CPP_LOG_LEVEL]  # an executor may complain
        timeout_s = self._config.placement.silence_timeout_s
        store = join_store(self._cluster.host, self._cluster.port, timeout_s)
        self._store = ClusterStore(store, self._config.placement.cluster_key)

    def _look(self) -> None:
        assert self._store is not None
        polling, rank = self._polling, self._cluster.rank
        assert polling is not None
        while not self._words.empty():
            self._store.say(self._words.get())
            if self._words.empty():
                polling.tell(self._said.set)
        beats = self._store.beats()
        try:
            notice, is_forged = self._store.read(), False
        except Forged:
            notice, is_forged = None, True
        got_place = None
        if self._has_met and notice is not None and notice.nonce and notice.nonce != self._looked_at:
            self._looked_at = notice.nonce
            got_place = self._store.take_place(notice.nonce, rank)
        polling.tell(partial(self._arrived, View(beats, notice, is_forged, got_place)))

    # ---- on the loop ------------------------------------------------------------------------

    def _post(self, handle: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        self._events.put_nowait(handle)

    def _store_gone(self, error: Exception) -> None:
        if not isinstance(error, RuntimeError):
            log.error("%s cannot go on", self._name, exc_info=error)
        self._polling = None
        self._post(partial(self._give_up, f"rank 0 is gone: the store at {self._cluster.store} has closed"))

    async def _give_up(self, reason: str) -> bool:
        if self._told_to_end:
            raise _ToldToEnd
        raise EngineDied(f"{self._name}: {reason}")

    async def _keep_time(self) -> None:
        silence_timeout_s = self._config.placement.silence_timeout_s
        while True:
            await asyncio.sleep(silence_timeout_s / TICKS)
            if self._has_met and self._watch.tick() is not None:
                self._post(partial(self._give_up, f"rank 0 is gone: no word of it for {silence_timeout_s:g} s"))

    def _arrived(self, view: View) -> None:
        if self._beats != view.beats:
            self._watch.heard()
            # The first number may be an earlier head's, in a store that outlives its users.
            self._has_met = self._has_met or self._beats is not None
            self._beats = view.beats
        if self._has_met:
            self._post(partial(self._see, view))

    async def _see(self, view: View) -> bool:
        """Handle a look at the store; returns whether all is done."""
        if view.is_forged:
            raise ConfigError(
                f"{self._name}: placement.cluster_key is not rank 0's, or a stranger writes to {self._cluster.store}"
            )
        if view.notice is None:
            return False
        if self._notice is None:
            self._meet(view.notice)
        self._notice = notice = view.notice
        if notice.state == "failed":
            raise EngineDied(f"{self._name}: rank 0 has failed: {notice.reason}")
        if notice.state == "done":
            await self._end_child()  # it has ended by itself if it was told to, and the head has waited for it
            log.info("%s: rank 0 is done", self._name)
            await self._say("left", "has ended")
            return True
        if self._nonce and notice.nonce != self._nonce:
            await self._end_generation()
        if view.got_place:
            self._begin(notice)
        elif view.got_place is False:
            self._nonce = notice.nonce
            twice = f"was its node started again, or is RANK={self._cluster.rank} set twice?"
            await self._say("lost", f"joins a second time: {twice}")
        return False

    def _meet(self, notice: Notice) -> None:
        """The head's first notice.  Raises ConfigError or WeightsError if we do not fit."""
        cluster = self._cluster
        if notice.release != our_release():
            raise ConfigError(f"{self._name}: rank 0 runs {notice.release}, we {our_release()}")
        if notice.num_ranks != cluster.size:
            raise ConfigError(f"{self._name}: WORLD_SIZE={cluster.size}, but rank 0 has WORLD_SIZE={notice.num_ranks}")
        if self._unfit is not None:
            raise self._unfit
        self._words.put(NodeStatus(cluster.rank, "here"))
        log.info("%s has found rank 0 at %s", self._name, cluster.store)

    # ---- the executor -----------------------------------------------------------------------

    def _begin(self, notice: Notice) -> None:
        rank = self._cluster.rank
        endpoint = notice.endpoints[rank]
        self._nonce = notice.nonce
        _, keys = link_keys(self._config.placement.cluster_key, notice.nonce, rank)
        ticket = Ticket(rank, f"executor{rank}", endpoint, keys, parent=os.getpid(), place=self._place)
        self._child = Child(self._module, ticket, partial(self._ended, notice.nonce))
        log.info("%s joins generation %d at %s (pid %d)", self._name, notice.generation, endpoint, self._child.pid)

    def _ended(self, nonce: str, how: str) -> None:
        if nonce == self._nonce:
            self._words.put(NodeStatus(self._cluster.rank, "lost", nonce, shortened(how)))
            if self._polling is not None:
                self._polling.hurry()

    async def _end_generation(self) -> None:
        if self._child is not None:
            log.info("%s: the generation is over", self._name)
        self._nonce = ""
        await self._end_child()

    async def _end_child(self) -> None:
        child = self._child
        if child is None:
            return
        child.kill()
        if not await child.wait(KILL_TIMEOUT_S):
            log.error("executor%d (pid %d) does not die; it holds its device", self._cluster.rank, child.pid)
        self._child = None

    # ---- the end ----------------------------------------------------------------------------

    async def _say(self, kind: Any, text: str) -> None:
        """Have a word written, and wait until it is."""
        if self._polling is None:
            return
        self._said.clear()
        self._words.put(NodeStatus(self._cluster.rank, kind, self._nonce, shortened(text)))
        self._polling.hurry()
        await is_set_within(SAY_TIMEOUT_S, self._said)

    def _on_signal(self) -> None:
        if self._told_to_end:
            self._post(self._leave)
            return
        self._told_to_end = True
        asyncio.get_running_loop().call_later(LEAVE_GRACE_S, self._post, self._leave_alone)

    async def _leave_alone(self) -> bool:
        """Told to end a moment ago: if the head was as well, its last requests need us until it has ended."""
        if self._notice is not None and self._notice.state == "leaving":
            log.info("%s waits for rank 0 to end its last requests", self._name)
            return False
        return await self._leave()

    async def _leave(self) -> bool:
        await self._end_child_silently()
        await self._say("left", "has left: its node was told to end")
        raise _ToldToEnd

    async def _end_child_silently(self) -> None:
        """Its end is no news of its own then; what is said next belongs to the generation all the same."""
        nonce, self._nonce = self._nonce, ""
        await self._end_child()
        self._nonce = nonce


class _ToldToEnd(Exception):
    """By a signal; not a failure."""
