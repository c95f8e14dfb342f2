"""The head: the server's process, as far as it starts ranks in the processes of other machines.

Owns: the links to nodes, and the ranks that each of them runs.
Does not know: the traffic of ranks, when a generation begins and why it ends.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq

from engine.config import Config
from engine.host.timeouts import is_set_within
from engine.types.errors import CallboardError, ConfigError
from engine.workers.child import Ticket
from engine.workers.keys import ClientKeys, Doorman
from engine.workers.link import LinkError
from engine.workers.linked_worker import Process
from engine.workers.machines.facts import differences, our_facts
from engine.workers.machines.launch import Launch
from engine.workers.machines.link import MachineLink, node_keys
from engine.workers.machines.messages import (
    Farewell,
    FromHead,
    FromNode,
    KillRank,
    NodeHere,
    NodeLeaving,
    RankEnded,
    StartRank,
    Welcome,
)
from engine.workers.messages import Place

log = logging.getLogger(__name__)

LEAVE_GRACE_S = 2.0  # a launcher that ends all machines reaches the head at most so much later than a node
LEAVE_TIMEOUT_S = 2.0
MAX_LOGGED_REFUSALS = 20

Ended = Callable[[str, CallboardError | None], None]


class RemoteRank:
    """The process of a rank on another machine.  ended: called once, with what became of it."""

    def __init__(self, order: StartRank, kill: Callable[[int], None], ended: Ended) -> None:
        self.order = order
        self._kill = kill
        self._ended = ended
        self._gone = asyncio.Event()

    def leave(self, how: str, error: CallboardError | None = None) -> None:
        """Take it that the process has ended."""
        self._gone.set()
        self._ended(how, error)

    def kill(self) -> None:
        """End it at once."""
        self._kill(self.order.number)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        return await is_set_within(timeout_s, self._gone)


class RemoteNode:
    """A node as the head sees it.  Ranks that are started before the node has come wait for it."""

    def __init__(self, number: int, head: "Head", context: "zmq.Context[Any]") -> None:
        self.is_here = False
        self.is_away = asyncio.Event()
        self.is_away.set()
        self.name = f"RANK={number}"
        self._head = head
        self._ranks: dict[int, RemoteRank] = {}
        self._misfit: ConfigError | None = None
        self._num_refused = 0
        self.link: MachineLink[FromNode] = MachineLink(
            f"node{number}",
            context,
            FromNode,
            self._take,
            silence_s=head.silence_s,
            disconnected=self._disconnected,
            refused=self._refused,
        )

    def start(self, rank: RemoteRank) -> None:
        """Start a rank's process, now or when the node comes."""
        self._ranks[rank.order.number] = rank
        if self._misfit is not None:
            asyncio.get_running_loop().call_soon(self._fail, self._misfit)
        elif self.is_here:
            self.send(rank.order)

    def kill(self, number: int) -> None:
        """End a rank's process; its end is heard of later, unless it never began."""
        if self.is_here:
            self.send(KillRank(number=number))
        elif (rank := self._ranks.pop(number, None)) is not None:
            rank.leave("was not started")

    def send(self, message: FromHead) -> None:
        """Send, or drop the message if the node is gone, which the link reports next."""
        with contextlib.suppress(LinkError):
            self.link.put(message)

    def _take(self, message: FromNode) -> None:
        match message:
            case NodeHere():
                self._came(message)
            case NodeLeaving() if self.is_here:
                asyncio.get_running_loop().call_later(LEAVE_GRACE_S, self._let_go)
            case RankEnded(number=number, how=how) if number in self._ranks:
                self._ranks.pop(number).leave(how)

    def _came(self, message: NodeHere) -> None:
        if self.is_here:
            self._went("cannot be reached: its machine has started again")
        problem = message.problem or differences(message.facts, self._head.facts)
        if problem:
            self._misfit = ConfigError(f"{self.name}: {problem}")
            log.warning("%s is refused: %s", self.name, problem)
            self.send(Farewell(reason=problem, is_refusal=True))
            if self._ranks:
                self._fail(self._misfit)
            return
        log.info("%s has come, from %d of the model's ranks on", self.name, self._head.launch.ranks)
        self.is_here, self._misfit = True, None
        self.is_away.clear()
        self.send(Welcome())
        for rank in self._ranks.values():
            self.send(rank.order)

    def _fail(self, error: ConfigError) -> None:
        """Report the misfit once: another node may be started in its place."""
        self._misfit = None
        self._went("does not fit", error)

    def _went(self, how: str, error: CallboardError | None = None) -> None:
        self.is_here = False
        self.is_away.set()
        ranks, self._ranks = self._ranks, {}
        for rank in ranks.values():
            rank.leave(how, error)

    def _let_go(self) -> None:
        if self.is_here and not self._head.is_draining():
            self.send(Farewell())
            self._went("has left: its process was asked to end")

    def _disconnected(self) -> None:
        if self.is_here and not self.link.has_peer:
            log.warning("%s has gone", self.name)
            self._went("cannot be reached: its machine has gone")

    def _refused(self) -> None:
        self._num_refused += 1
        if self._num_refused <= MAX_LOGGED_REFUSALS:
            log.warning("%s was refused: the process does not have our placement.cluster_key", self.name)


class Head:
    """An asynchronous context around the engine, in which the nodes may join.

    Its end ends the nodes: well, or with an error where this ends with one."""

    def __init__(self, launch: Launch, config: Config) -> None:
        self.launch = launch
        self.facts = our_facts(launch, config)
        self.join_timeout_s = config.placement.join_timeout_s
        self.silence_s = config.placement.silence_timeout_s
        self.is_draining: Callable[[], bool] = lambda: False
        self._cluster_key = config.placement.cluster_key
        self._numbers = itertools.count(1)
        self._nodes: dict[int, RemoteNode] = {}

    async def __aenter__(self) -> "Head":
        """Listen for the nodes.  Raises ConfigError if that cannot be."""
        _warn_of_loopback(self.launch.host)
        address = self._address()
        self._context = zmq.Context()
        self._doorman = Doorman(self._context)
        try:
            for number in range(1, self.launch.size):
                node = self._nodes[number] = RemoteNode(number, self, self._context)
                keys, client = node_keys(self._cluster_key, number)
                self._doorman.admit(node.link.name, frozenset((client.own.public,)))
                node.link.bind(f"tcp://{address}:{self.launch.port + number}", keys)
        except LinkError as error:
            self._close()
            raise ConfigError(f"placement.link: {error}") from None
        log.info("RANK=0 of %d: waiting for the others at %s and up", self.launch.size, self.launch.address(1))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason = ""
        if error is not None and not isinstance(error, asyncio.CancelledError):
            reason = str(error) if isinstance(error, CallboardError) else type(error).__name__
        here = [node for node in self._nodes.values() if node.is_here]
        for node in here:
            node.send(Farewell(reason=reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(*(node.is_away.wait() for node in here))
        self._close()

    def new_rendezvous(self) -> str:
        """A place for the ranks of one generation to form their group, which no other generation uses."""
        return f"env:///{secrets.token_hex(16)}"

    def place(self, rank: int) -> Place | None:
        """The place of a rank in this process, or None if a node runs it."""
        return self.launch.place(rank)

    @property
    def where(self) -> str:
        """Where the links of ranks on other machines listen, as in ``placement.link``."""
        return f"tcp://{self._address()}:0"

    def start(self, rank: int, endpoint: str, keys: ClientKeys, ended: Ended) -> Process:
        """Start the process of a rank on its machine.  endpoint, keys: of its link."""
        reached_at = f"tcp://{self.launch.host}:{endpoint.rpartition(':')[2]}"
        order = StartRank(number=next(self._numbers), ticket=Ticket(rank, f"executor{rank}", reached_at, keys))
        node = self._nodes[rank // self.launch.ranks]
        process = RemoteRank(order, node.kill, ended)
        node.start(process)
        return process

    def _address(self) -> str:
        """The address to listen on: ZeroMQ takes addresses and no names."""
        host = self.launch.listens_on
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:  # the latter of a name that can be none
            raise ConfigError(f"placement.link: {host}: {getattr(error, 'strerror', None) or error}") from None

    def _close(self) -> None:
        for node in self._nodes.values():
            node.link.close()
        self._doorman.close()
        self._context.term()


def _warn_of_loopback(host: str) -> None:
    """Many systems have their own name stand for a loopback address, which leads nowhere from another machine."""
    if host == "localhost" or host.startswith("127."):
        return  # meant
    with contextlib.suppress(OSError, UnicodeError):
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            log.warning("%s is %s here; if other machines cannot reach RANK 0, use its address instead", host, address)
