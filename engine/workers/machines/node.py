"""A node: the small process that runs some ranks of an engine whose server is on another machine.

Owns: the processes of these ranks, and its own end.
Does not know: requests, steps, other nodes; why a rank starts or ends.
It joins the head, starts and ends processes as the head orders, and joins again when the connection is lost.
"""

import asyncio
import contextlib
import logging
import os
import signal
from functools import partial

import zmq
from msgspec import structs

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.config import Config
from engine.types.errors import ConfigError, EngineDied, WeightsError
from engine.workers.child import Child
from engine.workers.link import LinkError
from engine.workers.machines.facts import our_facts
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

log = logging.getLogger(__name__)

ATTEMPT_S = 10.0  # a connection beside that of another process with the same RANK is never answered
PAUSE_S = 0.5
KILL_TIMEOUT_S = 10.0
MAX_REFUSALS = 3  # in a row; the end of the head looks like one
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Node:
    """module: what the processes of ranks run.  A checkpoint of the hub is downloaded here first."""

    def __init__(self, launch: Launch, config: Config, module: str = "engine.workers.executor_main") -> None:
        self.name = f"RANK={launch.index}"
        self._launch = launch
        self._module = module
        self._timeout_s = config.placement.join_timeout_s
        self._silence_s = config.placement.silence_timeout_s
        self._tokenizer = config.model.tokenizer
        _, self._keys = node_keys(config.placement.cluster_key, launch.index)
        self._path, problem = "", ""
        try:
            self._path = str(resolve_checkpoint(config.model.path, config.model.revision))
        except WeightsError as error:
            problem = str(error)
        self._here = NodeHere(facts=our_facts(launch, config), problem=problem)
        self._children: dict[int, Child] = {}
        self._num_refused = 0
        self._is_welcome = self._is_leaving = False
        self._link: MachineLink[FromHead] | None = None
        self._over: asyncio.Future[bool] | None = None

    async def run(self) -> None:
        """Run ranks until the head ends, or SIGTERM or SIGINT comes.

        Raises ConfigError if this machine does not fit the head's, EngineDied if the head has failed, or does not
        answer for placement.join_timeout_s."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._leave)
        address = self._launch.address(self._launch.index)
        log.info("%s of %d joins RANK=0 at %s", self.name, self._launch.size, address)
        deadline = loop.time() + self._timeout_s
        while loop.time() < deadline:
            if await self._attempt(f"tcp://{address}", min(ATTEMPT_S, deadline - loop.time())):
                return
            if self._is_welcome:
                log.warning("%s has lost RANK=0, and joins again", self.name)
                self._is_welcome, deadline = False, loop.time() + self._timeout_s
            await asyncio.sleep(PAUSE_S)
            if self._is_leaving:
                return
        raise EngineDied(
            f"{self.name}: RANK=0 has not answered at {address} for {self._timeout_s:g} s: is it running, can this "
            f"machine reach it, and has no other process {self.name}?"
        )

    async def _attempt(self, endpoint: str, timeout_s: float) -> bool:
        """Join, and run ranks for as long as the connection lasts.  Returns whether the node ends."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        context = zmq.Context()
        self._link = MachineLink(
            f"node{self._launch.index}",
            context,
            FromHead,
            self._take,
            silence_s=self._silence_s,
            disconnected=self._disconnected,
        )
        self._link.connect(endpoint, self._keys)
        self._link.put(self._here)
        unanswered = loop.call_later(timeout_s, self._give_up_unless_welcome)
        try:
            return await self._over or self._is_leaving
        finally:
            unanswered.cancel()
            await self._end_children()
            self._link.close()
            self._link = None
            context.term()

    # ---- what the head says -----------------------------------------------------------------

    def _take(self, message: FromHead) -> None:
        match message:
            case Welcome():
                self._is_welcome, self._num_refused = True, 0
                log.info("%s has joined RANK=0", self.name)
            case StartRank():
                self._start(message)
            case KillRank(number=number) if number in self._children:
                self._children[number].kill()
            case Farewell(reason="", is_refusal=False):
                log.info("%s: RANK=0 lets it end", self.name)
                self._end(True)
            case Farewell(reason=reason, is_refusal=True):
                self._fail(ConfigError(f"{self.name}: {reason}"))
            case Farewell(reason=reason):
                self._fail(EngineDied(f"{self.name}: RANK=0 has failed: {reason}"))

    def _start(self, order: StartRank) -> None:
        place = self._launch.place(order.ticket.rank)
        assert place is not None, f"{self.name} does not run rank {order.ticket.rank}"
        place = structs.replace(place, path=self._path, tokenizer=self._tokenizer)
        ticket = structs.replace(order.ticket, parent=os.getpid(), place=place)
        child = self._children[order.number] = Child(self._module, ticket, partial(self._ended, order.number))
        log.info("%s starts rank %d, linked to %s (pid %d)", self.name, ticket.rank, ticket.endpoint, child.pid)

    def _ended(self, number: int, how: str) -> None:
        self._children.pop(number, None)
        self._send(RankEnded(number=number, how=how))

    def _send(self, message: FromNode) -> None:
        if self._link is not None and self._is_welcome:
            with contextlib.suppress(LinkError):  # the head is gone, which the link reports next
                self._link.put(message)

    # ---- the end ----------------------------------------------------------------------------

    def _give_up_unless_welcome(self) -> None:
        if not self._is_welcome:
            self._end(False)

    def _end(self, is_done: bool) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(is_done)

    def _fail(self, error: ConfigError | EngineDied) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    def _disconnected(self) -> None:
        self._num_refused += not self._is_welcome
        if self._num_refused >= MAX_REFUSALS:
            address = self._launch.address(self._launch.index)
            reason = "placement.cluster_key is not RANK=0's, or another program listens there"
            self._fail(ConfigError(f"{self.name}: {address} refuses the connection: {reason}"))
        self._end(False)

    def _leave(self) -> None:
        """A signal: leave when the head lets us, or at once if there is none, or if this is the second signal."""
        if self._is_welcome and not self._is_leaving:
            self._is_leaving = True
            self._send(NodeLeaving())
        else:
            self._is_leaving = True
            self._end(True)

    async def _end_children(self) -> None:
        children = list(self._children.values())
        for child in children:
            child.kill()
        for child in children:
            if not await child.wait(KILL_TIMEOUT_S):
                log.error("%s: pid %d does not die; it holds its device", self.name, child.pid)
        self._children.clear()
