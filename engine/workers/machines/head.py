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
from engine.workers.keys import Authenticator, ClientKeys
from engine.workers.link import LinkError
from engine.workers.machines import messages as m
from engine.workers.machines.launch import Launch
from engine.workers.machines.link import MachineLink, node_keys
from engine.workers.machines.settings import MachinesSettings
from engine.workers.messages import Place

log = logging.getLogger(__name__)

LEAVE_GRACE_S = 2.0  # a launcher that ends all machines reaches the head at most so much later than a node
LEAVE_TIMEOUT_S = 2.0


class RemoteRank:
    """The process of a rank on another machine.  ended: called with what became of it."""

    def __init__(self, node: "RemoteNode", order: m.StartRank, ended: Callable[..., None]) -> None:
        self.order = order
        self.ended = ended
        self.gone = asyncio.Event()
        self._node = node

    def kill(self) -> None:
        """End it at once, or let it not begin."""
        if self._node.is_here:
            self._node.send(m.KillRank(number=self.order.number))
        else:
            self._node.rank_ended(self.order.number, "was not started")

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        return await is_set_within(timeout_s, self.gone)


class RemoteNode:
    """A node as the head sees it.  Ranks that are started before it has come wait for it.

    misfit: why the latest process that came cannot be it."""

    def __init__(self, number: int, head: "Head", context: "zmq.Context[Any]", silence_s: float) -> None:
        self.name = f"RANK={number}"
        self.misfit: ConfigError | None = None
        self.ranks: dict[int, RemoteRank] = {}
        self.is_away = asyncio.Event()
        self.is_away.set()
        self._head = head
        self.link: MachineLink[m.FromNode] = MachineLink(
            f"node{number}", context, m.FromNode, self._take, self._disconnected, silence_s=silence_s
        )

    @property
    def is_here(self) -> bool:
        """Whether it has joined, and its connection lasts."""
        return not self.is_away.is_set()

    def send(self, message: m.FromHead) -> None:
        """Send, or drop the message if the node is gone, which the link reports next."""
        with contextlib.suppress(LinkError):
            self.link.put(message)

    def rank_ended(self, number: int, how: str, error: CallboardError | None = None) -> None:
        """The process of a rank has ended; of an unknown one: no effect."""
        if (rank := self.ranks.pop(number, None)) is not None:
            rank.gone.set()
            rank.ended(how, error)

    def _take(self, message: m.FromNode) -> None:
        match message:
            case m.NodeHere():
                self._joined(message)
            case m.NodeLeaving():
                asyncio.get_running_loop().call_later(LEAVE_GRACE_S, self._release)
            case m.RankEnded(number=number, how=how):
                self.rank_ended(number, how)

    def _joined(self, here: m.NodeHere) -> None:
        if self.is_here:
            self._lost("cannot be reached: its machine has started again")
        ours = self._head.launch.facts()
        differing = [name for name in ours if here.facts.get(name) != ours[name]]
        differences = [f"{name} is {here.facts.get(name, 'unknown')}, at RANK=0 {ours[name]}" for name in differing]
        problem = here.problem or "; ".join(differences)
        self.misfit = ConfigError(f"{self.name}: {problem}") if problem else None
        if self.misfit is not None:
            log.warning("%s is refused: %s", self.name, problem)
            self.send(m.Farewell(reason=problem, is_refusal=True))
            self._lost("does not fit", self.misfit)
            return
        log.info("%s has come", self.name)
        self.is_away.clear()
        self.send(m.Welcome())
        for rank in self.ranks.values():
            self.send(rank.order)

    def _lost(self, how: str, error: CallboardError | None = None) -> None:
        self.is_away.set()
        for number in list(self.ranks):
            self.rank_ended(number, how, error)

    def _release(self) -> None:
        if self.is_here and not self._head.is_draining():
            self.send(m.Farewell())
            self._lost("has left: its process was asked to end")

    def _disconnected(self) -> None:
        if self.is_here and not self.link.has_peer:
            self._lost("cannot be reached: its machine has gone")


class Head:
    """An asynchronous context around the engine, in which the nodes may join.  See ``Machines`` as well.

    Its end ends the nodes: well, or with an error where this ends with one."""

    def __init__(self, launch: Launch, config: Config) -> None:
        self.launch = launch
        self._settings = MachinesSettings.of(config)
        self.join_timeout_s = self._settings.join_timeout_s
        self.is_draining: Callable[[], bool] = lambda: False
        self._placement = config.placement
        self._numbers = itertools.count(1)
        self._nodes: dict[int, RemoteNode] = {}

    async def __aenter__(self) -> "Head":
        """Listen for the nodes.  Raises ConfigError if that cannot be."""
        address = self._address()
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context)
        try:
            for number in range(1, self.launch.size):
                node = RemoteNode(number, self, self._context, self._placement.silence_timeout_s)
                self._nodes[number] = node
                keys, client = node_keys(self._settings.cluster_key, number)
                self._authenticator.admit(node.link.name, frozenset((client.own.public,)))
                node.link.bind(f"tcp://{address}:{self.launch.port + number}", keys)
                log.info("%s joins at %s; this process listens on %s", node.name, self.launch.address(number), address)
        except LinkError as error:
            self._close()
            raise ConfigError(f"placement.link: {error}") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_well = error is None or isinstance(error, asyncio.CancelledError)
        reason = "" if is_well else str(error) if isinstance(error, CallboardError) else type(error).__name__
        here = [node for node in self._nodes.values() if node.is_here]
        for node in here:
            node.send(m.Farewell(reason=reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(*(node.is_away.wait() for node in here))
        self._close()

    def _close(self) -> None:
        for node in self._nodes.values():
            node.link.close()
        self._authenticator.close()
        self._context.term()

    # ---- as ``Machines`` ------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The address of links, as in ``Machines``."""
        return f"tcp://{self._address()}:0"

    def new_rendezvous(self) -> str:
        """A URL of the launcher's store, with a name of its own."""
        return f"env:///{secrets.token_hex(16)}"

    def place(self, rank: int) -> Place | None:
        """The place of a rank, as in ``Machines``."""
        return self.launch.place(rank)

    def start(self, rank: int, endpoint: str, keys: ClientKeys, ended: Callable[..., None]) -> RemoteRank:
        """Start a rank, as in ``Machines``.  Raises ConfigError if the process that came for it does not fit."""
        node = self._nodes[rank // self.launch.ranks]
        if node.misfit is not None:
            raise node.misfit
        reached_at = f"tcp://{self.launch.host}:{endpoint.rpartition(':')[2]}"
        order = m.StartRank(number=next(self._numbers), ticket=Ticket(rank, f"executor{rank}", reached_at, keys))
        process = node.ranks[order.number] = RemoteRank(node, order, ended)
        if node.is_here:
            node.send(order)
        return process

    def _address(self) -> str:
        """The address to listen on: ZeroMQ takes addresses and no names."""
        host = self.launch.listens_on
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:  # the latter of a name that can be none
            raise ConfigError(f"placement.link: {host}: {getattr(error, 'strerror', None) or error}") from None
