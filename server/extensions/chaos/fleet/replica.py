"""A simulated replica: the real planner and the watcher that reports what its cache holds, on a simulated device.

Owns: its requests, its steps, its own death.  Does not know: routers, which requests it is sent.
The device remembers what was written to each page, so a token shows whether its pages were whole.
"""

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np

from engine.messages import Admit, Failed, Finish, Tokens
from engine.scheduling.planner import Planner
from engine.types.params import SamplingParams
from server.extensions.chaos.fleet.connections import SimAnswer
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.sim.device import SimDevice
from server.extensions.chaos.sim.probe import Probe, build_planner
from server.extensions.chaos.sim.scenario import SimSetup
from server.extensions.chaos.sim.store import SimStore
from server.extensions.replicas.held import LOOK_EVERY_S, WAIT_S, HeldPrompts, blocks_part
from server.generate.generation import ResumePoint
from server.http.sse import EVENT_STREAM
from server.proxy.affinity import PrefixAffinity

JSON = "application/json"
MOST_OPEN = 12


class AskedBody(msgspec.Struct, frozen=True):
    """The fields of a client's request.  number: of its operation."""

    prompt: list[int]
    max_tokens: int
    number: int


class RoutedBody(msgspec.Struct, frozen=True):
    """A request as a router sends it."""

    request: msgspec.Raw
    origin: ResumePoint


class _RunningRequest:
    """A request that runs."""

    def __init__(self, answer: SimAnswer, num_prompt: int) -> None:
        self.answer = answer
        self.num_prompt = num_prompt


class SimReplica:
    """A replica.  new_planner, step_s: of its engine.  mark: called with names of scarce events."""

    def __init__(
        self, name: str, setup: SimSetup, ledger: Ledger, clock: Callable[[], float], mark: Callable[[str], None]
    ) -> None:
        self.name = name
        self.is_alive = False
        self.is_cut_off = False
        self.is_stopping = False
        self._setup, self._ledger, self._clock, self._mark = setup, ledger, clock, mark
        self._affinity = PrefixAffinity()
        self._life = 0
        self._next_id = 0
        self._open: dict[int, _RunningRequest] = {}
        self._work = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.planner: Planner

    @property
    def is_reachable(self) -> bool:
        """Whether it is there and the way to it is open."""
        return self.is_alive and not self.is_cut_off

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return len(self._open)

    def start(self) -> None:
        """Begin with an empty cache."""
        self._life += 1
        self.is_alive, self.is_stopping = True, False
        self.held = HeldPrompts()
        self._device = self._new_device()
        planner = self.planner = build_planner(self._setup, self._setup.num_pages, self._clock, None, (self.held,))
        self._probe = Probe(planner, self._mark, self._device.poison, self._device.will_save)
        self._open = {}
        self.task = asyncio.ensure_future(self._run())

    def kill(self) -> None:
        """End at once."""
        self.is_alive = False
        if self.task is not None:
            self.task.cancel()
        for request in self._open.values():
            request.answer.cut()
        self._open = {}
        self._ledger.note("pages", pool=self.name, counts=[self._setup.num_pages, 0, 0, 0], total=self._setup.num_pages)

    def cut_off(self) -> None:
        """Let every connection break, and no new one come about."""
        self.is_cut_off = True
        for request_id, request in list(self._open.items()):
            request.answer.cut()
            self._leave(request_id)

    async def answer(self, method: str, path: str, body: bytes) -> SimAnswer:
        """Answer a request of a router."""
        if path == "/ready":
            return SimAnswer(503 if self.is_stopping else 200, JSON, [b"{}"])
        if path.startswith("/held_blocks"):
            return await self._report(path)
        if self.num_open >= MOST_OPEN or self.is_stopping:
            self._mark("replica full or leaving")
            return SimAnswer(503 if self.is_stopping else 429, JSON, [b"{}"])
        return self._take(msgspec.json.decode(body, type=RoutedBody))

    async def _report(self, path: str) -> SimAnswer:
        query = dict(part.split("=") for part in path.partition("?")[2].split("&"))
        since = query["epoch"], int(query["version"])
        for _ in range(round(WAIT_S / LOOK_EVERY_S)):
            if self.held.report(*since).version != since[1] or self.held.epoch != since[0]:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        return SimAnswer(200, "application/msgpack", [msgspec.msgpack.encode(self.held.report(*since))])

    def _take(self, routed: RoutedBody) -> SimAnswer:
        asked = msgspec.json.decode(routed.request, type=AskedBody)
        delivered = routed.origin.told.get(0)
        known = list(asked.prompt)
        if delivered is not None:
            known += np.frombuffer(delivered.resumed, dtype=np.int32).tolist()
            self._mark("stream resumed")
        self._next_id += 1
        request_id = self._next_id
        answer = SimAnswer(200, EVENT_STREAM, abandon=lambda: self._leave(request_id))
        answer.headers["Content-Type"] = EVENT_STREAM
        self._open[request_id] = _RunningRequest(answer, len(asked.prompt))
        self.planner.admit(
            Admit(
                request_id=request_id,
                token_ids=np.array(known, dtype=np.int32).tobytes(),
                params=SamplingParams(max_tokens=asked.max_tokens, seed=asked.number + 1, ignore_eos=True),
                num_resumed=len(known) - len(asked.prompt),
                parts=blocks_part(self._affinity.blocks(bytes(routed.request))),
            )
        )
        self._work.set()
        return answer

    def _leave(self, request_id: int) -> None:
        if self.is_alive and self._open.pop(request_id, None) is not None:
            self.planner.abort(request_id)
            self._work.set()

    async def _run(self) -> None:
        while True:
            step = self.planner.next_step()
            self._deliver()
            if step is None:
                self._work.clear()
                await self._work.wait()
                continue
            await asyncio.sleep(self._setup.step_s * (1 + len(step.prefill_rows) / 4))
            self.planner.complete(self._device.run(step))
            self._deliver()

    def _deliver(self) -> None:
        for message in self.planner.outbox:
            if isinstance(message, Tokens):
                self._send(message)
            elif isinstance(message, Failed):
                self._fail(message)
        self.planner.outbox.clear()
        self.planner.finished.clear()
        self._ledger.note_change(
            "pages", pool=self.name, counts=list(self._probe.page_counts), total=self._probe.num_pages
        )

    def _send(self, message: Tokens) -> None:
        ids = np.frombuffer(message.request_ids, dtype=np.int64).tolist()
        tokens = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        for request_id, token, finish in zip(ids, tokens, message.finishes, strict=True):
            request = self._open.get(request_id)
            if request is None:
                continue
            kept = [token] if token >= 0 else []
            event = msgspec.json.encode({"tokens": kept, "finish": Finish(finish).name.lower() if finish else ""})
            marked = np.array(kept, dtype=np.int32).tobytes().hex().encode()
            request.answer.write(b"data: %b\n\n: 0 %b %d %d 1\n\n" % (event, marked, finish, request.num_prompt))
            if finish:
                request.answer.end()
                del self._open[request_id]

    def _fail(self, message: Failed) -> None:
        if (request := self._open.pop(message.request_id, None)) is not None:
            request.answer.write(b'data: {"error":{"code":"%b"}}\n\n' % message.code.encode())
            request.answer.end()

    def _new_device(self) -> SimDevice:
        setup = self._setup
        return SimDevice(
            num_rows=setup.max_running,
            num_slots=0,
            max_len=setup.max_len,
            page_size=setup.page_size,
            num_pages=setup.num_pages,
            num_host_pages=setup.num_host_pages,
            store=SimStore(0, 0.0),
            nan_tokens={},
            breaks={},
            draft=lambda tokens, most: [],
            mark=self._mark,
        )
