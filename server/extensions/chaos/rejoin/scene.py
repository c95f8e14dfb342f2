"""Streams that outlive their connections and their server: clients that come back, kills, losses of power, full disks.

Owns: how a plan is carried out, when it is over.  Does not know: what is right (``checker.py``).
The journal, its streams, the numbered events, the route and the engine's actors are the code that serves; the disk,
connections, clients and the device are simulated.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from engine.types.errors import ConfigError
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.rejoin.client import StreamClient
from server.extensions.chaos.rejoin.disk import SimDisk
from server.extensions.chaos.rejoin.life import ServerLife
from server.extensions.chaos.rejoin.plan import REJOIN_S, RejoinOp, RejoinPlan
from server.extensions.chaos.sim.failures import SimStuck
from server.extensions.chaos.sim.loop import SimLoop
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.journal import journal, run, streams

LIVENESS_S = 120.0
POLL_S = 0.1
CLOCKED = (journal, run, streams)
SHORT = {"MEND_EVERY_S": 0.4, "FSYNC_EVERY_S": 0.3}  # as the streams are


class RejoinScene:
    """One run.  marks: what scarce things happened.  faults: by kind.  failure: what the run itself found wrong."""

    def __init__(self, plan: RejoinPlan, order: int, ledger: Ledger) -> None:
        self.plan, self._order, self._ledger = plan, order, ledger
        self.marks: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.failure: tuple[str, str] | None = None
        self.loop = SimLoop(lambda function, arguments: 2 * plan.disk_s * self._dice())
        self.loop.set_exception_handler(lambda _, context: self._fail(context.get("exception") or context["message"]))
        ledger.begin(self.loop.time)
        self._num_draws = 0
        self._clients: dict[int, StreamClient] = {}
        self._life: ServerLife | None = None
        self._disk = SimDisk()
        self._restarting: asyncio.Task[None] | None = None
        self._driver: asyncio.Task[Any] | None = None

    def run(self) -> None:
        """Carry out the plan."""
        with self._virtual():
            self.loop.play(self._play(), self._fail)

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        """Give the journal the clock and the dice of the run."""
        clock = SimpleNamespace(time=lambda: 1e9 + self.loop.time())
        changes: list[Any] = [patch.object(module, "time", clock) for module in CLOCKED]
        changes += [patch.object(journal, name, seconds) for name, seconds in SHORT.items()]
        changes.append(patch.object(streams, "new_seed", lambda: 1))
        for change in changes:
            change.start()
        try:
            yield
        finally:
            for change in changes:
                change.stop()

    def _dice(self) -> float:
        self._num_draws += 1
        return luck(self.plan.seed, self._order, self._num_draws)

    def _mark(self, name: str) -> None:
        self.marks[name] += 1

    def _fail(self, error: object) -> None:
        if self.failure is None and not isinstance(error, asyncio.CancelledError):
            self.failure = type(error).__name__, str(error)

    def _server(self) -> ServerLife | None:
        return self._life if self._life is not None and self._life.is_up else None

    # ---- the run ----------------------------------------------------------------------------

    async def _play(self) -> None:
        self._driver, setup = asyncio.current_task(), self.plan.setup
        self._ledger.note("run", seed=self.plan.seed, vocab=VOCAB, longest=setup.longest, special=[0])
        await self._start()
        began = self.loop.time()
        for number, op in self.plan.ops.items():
            await asyncio.sleep(max(0.0, op.at + began - self.loop.time()))
            self._apply(number, op)
        await self._until(lambda: all(one.is_over for one in self._clients.values()), "streams to end")
        await self._until(lambda: self._server() is not None, "the server to come back")
        for client in self._clients.values():
            self._raise_of(client.task)
            if client.num_returns:
                self._mark("stream rejoined")
        await asyncio.sleep(REJOIN_S)
        life = self._life
        assert life is not None
        await self._until(lambda: not any(life.counts) and life.is_quiet, "streams to be forgotten")
        self._ledger.note("held", owner="journal", counts=life.counts)
        self._ledger.note("over")

    def _apply(self, number: int, op: RejoinOp) -> None:
        if op.kind == "Ask":
            self._clients[number] = StreamClient(number, op, self._ledger, self._server)
            return
        client = self._clients.get(op.target)
        if op.target >= 0 and (client is None or client.is_over):
            return
        if op.kind == "Leave":
            assert client is not None
            client.leave()
            return
        if op.kind != "Full" and op.target < 0 and self._server() is None:
            return  # it is gone already
        self._note_fault(op.kind)
        match op.kind:
            case "Away" | "Late":
                assert client is not None
                client.go_away(op.seconds)
            case "Kill" | "Power":
                self._end_life(op)
            case "Full":
                self._disk.is_full = True
                self.loop.call_later(op.seconds, self._make_room)

    def _make_room(self) -> None:
        self._disk.is_full = False

    def _note_fault(self, kind: str) -> None:
        self.faults[kind] += 1
        self._ledger.note("fault", kind=kind)

    def _end_life(self, op: RejoinOp) -> None:
        """Kill the server's process, or the whole machine."""
        life = self._life
        assert life is not None
        if life.journal.is_failing or self._disk.is_full:
            self._note_fault("FullAtEnd")
        if op.kind == "Power" and self.plan.fsync != "always":
            self._note_fault("Unsynced")
        life.kill()
        driver = {self._driver, *(client.task for client in self._clients.values())}
        for task in sorted(asyncio.all_tasks(self.loop) - driver, key=lambda one: one.get_name()):
            task.cancel()
        for client in self._clients.values():
            if client.connection is not None:
                client.connection.cut()
        is_full = self._disk.is_full
        self._disk = self._disk.after_kill() if op.kind == "Kill" else self._disk.after_power_loss(self._dice)
        self._disk.is_full = is_full
        self._restarting = self.loop.create_task(self._restart(op.seconds))

    async def _restart(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._server() is None:
            try:
                await self._start()
                self._mark("server came back")
            except ConfigError:  # no room for a journal: whatever starts servers tries again
                self._mark("start refused")
                await asyncio.sleep(POLL_S)

    async def _start(self) -> None:
        self._life = ServerLife(self.plan, self._disk, self._ledger, self._mark)
        await self._life.start()

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        ends_at = self.loop.time() + LIVENESS_S
        while not is_so():
            if self.loop.time() > ends_at:
                raise SimStuck(f"waited {LIVENESS_S:g} s for {what}")
            await asyncio.sleep(POLL_S)
            for client in self._clients.values():
                self._raise_of(client.task)
            if self._restarting is not None:
                self._raise_of(self._restarting)

    def _raise_of(self, task: "asyncio.Task[None]") -> None:
        """Raise what has ended a task."""
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


def play(plan: RejoinPlan, kept: list[int] | None, order: int, ledger: Ledger) -> RejoinScene:
    """Run a plan, or some of its operations."""
    if kept is not None:
        plan.ops = {number: op for number, op in plan.ops.items() if number in kept}
    scene = RejoinScene(plan, order, ledger)
    scene.run()
    return scene
