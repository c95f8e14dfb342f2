"""The head of a cluster, beside the server in rank 0's process: it calls the other machines to every generation.

Owns: the store where it serves one, the notice, and what becomes of the nodes' words.
Does not know: links' traffic, when a generation begins and why it ends.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import msgspec

from engine.config import Config
from engine.host.timeouts import is_set_within
from engine.types.errors import CallboardError, ConfigError, EngineDied
from engine.workers.cluster.environment import Cluster, link_place
from engine.workers.cluster.polling import Polling
from engine.workers.cluster.store import (
    ClusterStore,
    Forged,
    NodeStatus,
    Notice,
    link_keys,
    our_release,
    rendezvous,
    shortened,
)
from engine.workers.keys import ClientKeys, KeyPair

log = logging.getLogger(__name__)

PAUSE_S = 0.25  # between looks at the store
STORE_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 2.0  # for the nodes to see that all is done, before the store is gone
MAX_LOGGED_FORGERIES = 20

Ended = Callable[[str, CallboardError | None], None]


class RemoteProcess:
    """A rank's process on another machine, whose node starts and ends it.

    ended: told what has become of it, and an error that would only come again."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._left = asyncio.Event()

    def leave(self, how: str, error: CallboardError | None) -> None:
        """It has ended."""
        self._left.set()
        self._ended(how, error)

    def kill(self) -> None:
        """Wait for it no longer: its node ends it, and before it starts another one."""
        self._left.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        return await is_set_within(timeout_s, self._left)


class Call:
    """One generation as the other machines hear of it.  rendezvous: where its ranks form their communicator."""

    def __init__(self, head: "Head") -> None:
        self.nonce = secrets.token_hex(16)
        self.rendezvous = rendezvous(head.cluster, self.nonce)
        self._head = head
        self._endpoints = [""] * head.cluster.size
        self._processes: dict[int, RemoteProcess] = {}

    def link(self, rank: int) -> tuple[str, tuple[KeyPair, ClientKeys]]:
        """Where a rank's link listens, as ZeroMQ takes it, and its keys.  Raises ConfigError if that is nowhere."""
        return self._head.listening_place(rank), link_keys(self._head.cluster_key, self.nonce, rank)

    def process(self, rank: int, endpoint: str, ended: Ended) -> RemoteProcess:
        """The process of a rank, whose link listens at ``endpoint``.  Once all links do, the nodes may come."""
        self._endpoints[rank] = f"tcp://{self._head.reached_by}:{endpoint.rpartition(':')[2]}"
        self._processes[rank] = RemoteProcess(ended)
        if all(self._endpoints[1:]):
            self._head.begin(self, tuple(self._endpoints))
        return self._processes[rank]

    def lost(self, rank: int, how: str, error: CallboardError | None) -> None:
        """What has become of a rank, and an error that would only come again."""
        self._processes[rank].leave(how, error)

    def end(self) -> None:
        """Let the nodes end their executors; again: no effect."""
        self._head.end(self)


class Head:
    """An asynchronous context around the engine of rank 0's machine.

    Its end tells the nodes to end too: well, or with an error where this ends with one.
    """

    def __init__(self, cluster: Cluster, config: Config) -> None:
        self.cluster = cluster
        self.cluster_key = config.placement.cluster_key
        self.join_timeout_s = config.placement.join_timeout_s
        self._listens_on, self.reached_by, self._port = link_place(cluster, config)
        self._nodes = range(1, cluster.size)
        self._store: ClusterStore | None = None
        self._polling: Polling | None = None
        self._notice = Notice(our_release(), cluster.size)
        self._posted: Notice | None = None
        self._heard: dict[int, bytes] = {}
        self._unfit: dict[int, NodeStatus] = {}  # what those have said that do not fit, until they say something else
        self._num_forgeries = 0
        self._generation = 0
        self._call: Call | None = None
        self._gone: EngineDied | None = None
        self._here: set[int] = set()
        self._last_posted = asyncio.Event()
        self._nobody_here = asyncio.Event()
        self._nobody_here.set()
        self._is_leaving: Callable[[], bool] = lambda: False

    async def __aenter__(self) -> "Head":
        """Serve the store, or reach the launcher's.  Raises ConfigError if that cannot be."""
        whose = "a launcher's" if self.cluster.is_served else "ours"
        log.info("rank 0 of %d, the head: the store is %s, at %s", self.cluster.size, whose, self.cluster.store)
        for host in sorted({self.cluster.host, self.reached_by}):
            _warn_of_loopback(host)
        self._store = ClusterStore(self._open_store(), self.cluster_key)
        self._polling = Polling("head", self._begin, self._go, self._store_gone, pause_s=PAUSE_S)
        self._polling.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._polling is not None
        if error is None or isinstance(error, asyncio.CancelledError):
            self._say(state="done", nonce="", endpoints=())
        else:
            reason = str(error) if isinstance(error, CallboardError) else type(error).__name__
            self._say(state="failed", reason=shortened(reason), nonce="", endpoints=())
        if self._gone is None:
            try:
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._last_posted.wait()
                    await self._nobody_here.wait()
            except TimeoutError:
                log.info("%s did not say goodbye", named(sorted(self._here)) if self._here else "the store")
        self._polling.end()

    def follow(self, is_leaving: Callable[[], bool]) -> None:
        """is_leaving: whether no more requests are taken.  Nodes that were told to end then wait for those that run;
        asked from another thread."""
        self._is_leaving = is_leaving

    def call(self) -> Call:
        """A new generation.  Raises EngineDied if nodes cannot be reached any more."""
        if self._gone is not None:
            raise self._gone
        return Call(self)

    def listening_place(self, rank: int) -> str:
        """Where ZeroMQ listens for a rank; it takes addresses and no names."""
        try:
            address = socket.getaddrinfo(self._listens_on, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        except (OSError, UnicodeError) as error:  # the latter of a name that can be none
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"placement.link: {self._listens_on}: {reason}") from None
        return f"tcp://{address}:{self._port + rank if self._port else '*'}"

    def begin(self, call: Call, endpoints: tuple[str, ...]) -> None:
        self._generation += 1
        self._call = call
        self._say(generation=self._generation, nonce=call.nonce, endpoints=endpoints)
        for word in self._unfit.values():  # said while no generation was being called
            asyncio.get_running_loop().call_soon(self._pass_on, word)
        places = ", ".join(endpoint.removeprefix("tcp://") for endpoint in endpoints if endpoint)
        log.info("generation %d: waiting for %s to join at %s", self._generation, named(self._nodes), places)

    def end(self, call: Call) -> None:
        if self._call is call:
            self._call = None
            self._say(nonce="", endpoints=())

    def _say(self, **changes: object) -> None:
        assert self._polling is not None
        self._notice = msgspec.structs.replace(self._notice, **changes)
        self._polling.hurry()

    # ---- on the thread ----------------------------------------------------------------------

    def _open_store(self) -> object:
        from engine.plugins.support.rendezvous import join_store, serve_store  # torch is needed from here on

        cluster = self.cluster
        try:
            opens = join_store if cluster.is_served else serve_store
            return opens(cluster.host, cluster.port, STORE_TIMEOUT_S)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ConfigError(f"MASTER_ADDR:MASTER_PORT={cluster.store}: no rendezvous store: {reason}") from None

    def _begin(self) -> None:
        assert self._store is not None
        self._store.clear(self._nodes)

    def _go(self) -> None:
        assert self._store is not None
        assert self._polling is not None
        if self._notice.state == "serving" and self._is_leaving():
            self._polling.tell(self._note_leaving)
        notice = self._notice
        if notice is not self._posted:
            self._store.post(notice)
            self._posted = notice
            if notice.state in ("done", "failed"):
                self._polling.tell(self._last_posted.set)
        self._store.beat()  # after the notice: who sees a beat knows that the notice is of a head that lives
        for rank, sealed in zip(self._nodes, self._store.slots(self._nodes), strict=True):
            if sealed and sealed != self._heard.get(rank):
                self._heard[rank] = sealed
                self._polling.tell(partial(self._hear, rank, sealed))

    # ---- on the loop ------------------------------------------------------------------------

    def _note_leaving(self) -> None:
        if self._notice.state == "serving":
            self._say(state="leaving")

    def _hear(self, rank: int, sealed: bytes) -> None:
        assert self._store is not None
        try:
            word = self._store.read_status(sealed, rank)
        except Forged:
            self._num_forgeries += 1
            if self._num_forgeries <= MAX_LOGGED_FORGERIES:
                log.warning(
                    "rank %d was refused: it has not our placement.cluster_key, or a stranger writes to the store", rank
                )
            return
        log.debug("rank %d: %s %s", rank, word.kind, word.text)
        self._unfit.pop(rank, None)
        if word.kind == "unfit":
            self._unfit[rank] = word
        if word.kind in ("left", "unfit"):
            self._here.discard(rank)
        else:
            self._here.add(rank)
            self._nobody_here.clear()
        if not self._here:
            self._nobody_here.set()
        self._pass_on(word)

    def _pass_on(self, word: NodeStatus) -> None:
        call = self._call
        if call is None or word.kind == "here":
            return
        if word.kind == "unfit":
            call.lost(word.rank, word.text, ConfigError(f"rank {word.rank}: {word.text}"))
        elif word.nonce == call.nonce:
            call.lost(word.rank, word.text, None)

    def _store_gone(self, error: Exception) -> None:
        if not isinstance(error, RuntimeError):
            log.error("the head cannot go on", exc_info=error)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        self._gone = EngineDied(f"the rendezvous store at {self.cluster.store} is gone: {reason}")
        log.error("%s", self._gone)
        if self._call is not None:
            self._call.lost(1, "cannot be reached: the rendezvous store is gone", None)


def _warn_of_loopback(host: str) -> None:
    """Many systems have their own name stand for a loopback address, which leads nowhere from another machine."""
    if host == "localhost" or host.startswith("127."):
        return  # meant
    with contextlib.suppress(OSError, UnicodeError):
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            log.warning("%s is %s here; if other machines cannot reach rank 0, use its address instead", host, address)


def named(ranks: Sequence[int]) -> str:
    """Ranks in a sentence."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
