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
from engine.types.errors import CallboardError, ConfigError, EngineDied, WeightsError
from engine.workers.child import Child
from engine.workers.link import LinkError
from engine.workers.linked_worker import KILL_TIMEOUT_S
from engine.workers.machines import messages as m
from engine.workers.machines.launch import Launch
from engine.workers.machines.link import MachineLink, node_keys
from engine.workers.machines.settings import MachinesSettings

log = logging.getLogger(__name__)

ATTEMPT_S = 10.0  # a connection beside that of another process with the same RANK is never answered
PAUSE_S = 0.5
MAX_REFUSALS = 3  # in a row; the end of the head looks like one


class MachineNode:
    """A node, which downloads a checkpoint of the hub first.  module: what the processes of ranks run."""

    def __init__(self, launch: Launch, config: Config, module: str = "engine.workers.executor_main") -> None:
        self._name = f"RANK={launch.index}"
        self._launch = launch
        self._config = config
        self._module = module
        self._address = launch.address(launch.index)
        self._path = self._problem = ""
        try:
            self._path = str(resolve_checkpoint(config.model.path, config.model.revision))
        except WeightsError as error:
            self._problem = str(error)
        self._children: dict[int, Child] = {}
        self._num_refused = 0
        self._is_welcome = self._is_leaving = False

    async def run(self) -> None:
        """Run ranks until the head ends, or SIGTERM or SIGINT comes.

        Raises ConfigError if this machine does not fit the head's, EngineDied if the head has failed, or does not
        answer for placement.join_timeout_s."""
        loop, timeout_s = asyncio.get_running_loop(), MachinesSettings.of(self._config).join_timeout_s
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        log.info("%s joins RANK=0 at %s", self._name, self._address)
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            if self._is_leaving or await self._attempt(min(ATTEMPT_S, deadline - loop.time())):
                return
            if self._is_welcome:
                log.warning("%s has lost RANK=0, and joins again", self._name)
                self._is_welcome, deadline = False, loop.time() + timeout_s
            await asyncio.sleep(PAUSE_S)
        raise EngineDied(
            f"{self._name}: RANK=0 has not answered at {self._address} for {timeout_s:g} s: is it running, can this "
            f"machine reach it, and has no other process {self._name}?"
        )

    async def _attempt(self, timeout_s: float) -> bool:
        """Join, and run ranks for as long as the connection lasts.  Returns whether the head has let us go."""
        placement, context, loop = self._config.placement, zmq.Context(), asyncio.get_running_loop()
        key = MachinesSettings.of(self._config).cluster_key
        self._over: asyncio.Future[bool] = loop.create_future()
        self._link: MachineLink[m.FromHead] = MachineLink(
            "head", context, m.FromHead, self._take, self._disconnected, silence_s=placement.silence_timeout_s
        )
        self._link.connect(f"tcp://{self._address}", node_keys(key, self._launch.index)[1])
        self._link.put(m.NodeHere(facts=self._launch.facts(), problem=self._problem))
        unanswered = loop.call_later(timeout_s, lambda: None if self._is_welcome else self._end(False))
        try:
            return await self._over
        finally:
            unanswered.cancel()
            await self._end_children()
            self._link.close()
            context.term()

    def _take(self, message: m.FromHead) -> None:
        match message:
            case m.Welcome():
                self._is_welcome, self._num_refused = True, 0
                log.info("%s has joined RANK=0", self._name)
            case m.StartRank():
                self._start(message)
            case m.KillRank(number=number) if number in self._children:
                self._children[number].kill()
            case m.Farewell(reason=""):
                log.info("%s: RANK=0 lets it end", self._name)
                self._end(True)
            case m.Farewell(reason=reason, is_refusal=True):
                self._end(ConfigError(f"{self._name}: {reason}"))
            case m.Farewell(reason=reason):
                self._end(EngineDied(f"{self._name}: RANK=0 has failed: {reason}"))

    def _start(self, order: m.StartRank) -> None:
        place = self._launch.place(order.ticket.rank)
        assert place is not None, f"{self._name} does not run rank {order.ticket.rank}"
        place = structs.replace(place, path=self._path, tokenizer=self._config.model.tokenizer)
        ticket = structs.replace(order.ticket, parent=os.getpid(), place=place)
        child = self._children[order.number] = Child(self._module, ticket, partial(self._ended, order.number))
        log.info("%s starts rank %d, linked to %s (pid %d)", self._name, ticket.rank, ticket.endpoint, child.pid)

    def _ended(self, number: int, how: str) -> None:
        del self._children[number]
        with contextlib.suppress(LinkError):  # the head is gone, which the link reports next
            self._link.put(m.RankEnded(number=number, how=how))

    async def _end_children(self) -> None:
        children = list(self._children.values())
        for child in children:
            child.kill()
        for child in children:
            if not await child.wait(KILL_TIMEOUT_S):
                log.error("%s: pid %d does not die; it holds its device", self._name, child.pid)

    # ---- the end ----------------------------------------------------------------------------

    def _end(self, outcome: bool | CallboardError) -> None:
        if self._over.done():
            return
        if isinstance(outcome, CallboardError):
            self._over.set_exception(outcome)
        else:
            self._over.set_result(outcome)

    def _disconnected(self) -> None:
        self._num_refused += not self._is_welcome
        if self._num_refused >= MAX_REFUSALS:
            reason = "placement.cluster_key is not RANK=0's, or another program listens there"
            self._end(ConfigError(f"{self._name}: {self._address} refuses the connection: {reason}"))
        self._end(False)

    def _leave(self) -> None:
        """A signal: leave when the head lets us, or at once if we have not joined, or at the second signal."""
        is_first, self._is_leaving = not self._is_leaving, True
        if self._is_welcome and is_first:
            with contextlib.suppress(LinkError):
                self._link.put(m.NodeLeaving())
        else:
            self._end(True)
