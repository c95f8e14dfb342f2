"""One life of a server's process: the engine's actors, the streams and their journal.

Owns: how they are put together, and that they end at once.  Does not know: clients, what comes after it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.test_utils import make_mocked_request

from engine.scheduling.planner import Planner
from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from server.clients import CLIENT, Clients
from server.extensions.chaos.fleet.connections import ClientWriter
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.rejoin.disk import SimDisk, SimSegments
from server.extensions.chaos.rejoin.plan import REJOIN_S, RejoinPlan
from server.extensions.chaos.sim.assembly import assemble
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.probe import Probe, build_planner, wrap
from server.extensions.chaos.sim.scenario import Scenario
from server.extensions.chaos.sim.world import FixedPlanners
from server.extensions.journal.journal import Journal
from server.extensions.journal.streams import LAST_EVENT_ID, Streams
from server.generate.route import GenerateRoute
from server.http.exchange import EXCHANGE, Exchange
from server.model_card import ModelCard
from server.openai.completions import CompletionsEndpoint
from server.openai.translator import Translator

PATH, MODEL, POOL = "/v1/completions", "simulated", "server"
MOST_BYTES = 8 << 20  # of the journal
SILENT = SimpleNamespace(
    wants_requests=False, request_finished=lambda metrics: None, kv_event=lambda events: None, close=lambda: None
)


class ClientConnection:
    """A client's end of a connection.  take: gets the bytes that arrive.  error: what was answered in their place."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self.error: RequestError | None = None
        self.closed = asyncio.Event()

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self.closed.is_set()

    def cut(self) -> None:
        """Let it break."""
        self.closed.set()

    abort = cut

    def write(self, data: bytes) -> None:
        """Carry bytes to the client.  Raises ConnectionResetError if it has left."""
        if self.closed.is_set():
            raise ConnectionResetError("the client has left")
        self._take(bytes(data))


class ServerLife:
    """A server from its start to its end.  ledger, mark: get the events of the run."""

    def __init__(self, plan: RejoinPlan, disk: SimDisk, ledger: Ledger, mark: Callable[[str], None]) -> None:
        self.disk = disk
        self.is_up = False
        self._setup, self._ledger, self._mark = plan.setup, ledger, mark
        self._probe: Probe | None = None
        self.engine = assemble(
            Scenario(plan.seed, plan.setup),
            source=FixedPlanners(plan.setup.overlap, self._new_planner),
            observers=SILENT,
            nan_tokens={},
            breaks={},
            mark=mark,
            op_of=lambda request_id: request_id,
            watch=lambda link, message: None,
        )
        wrap(self.engine.scheduler, "flush", self._flush)
        self.journal = Journal(
            Path(), fsync=plan.fsync, most_bytes=MOST_BYTES, segments=lambda folder: SimSegments(disk)
        )
        self.clients = Clients(self.engine.ingress, ServerSection(), LimitsSection())
        self.streams = Streams(self.journal, self.clients, None, rejoin_s=REJOIN_S, model=lambda: MODEL)
        card = ModelCard(name=MODEL, max_model_len=plan.setup.max_len, vocab_size=VOCAB, created=0)
        self._route = GenerateRoute(CompletionsEndpoint(Translator(card)), ServerSection())
        self.streams.routes[PATH] = self._route

    @property
    def counts(self) -> list[int]:
        """Requests that the journal has, their bytes in memory, files that are not needed, streams, open choices."""
        journal, num_files = self.journal, len(self.journal._segments.sizes)
        open_choices = sum(self.clients.num_open.values())
        return [len(journal.entries), journal._kept_bytes, num_files - 1, len(self.streams._runs), open_choices]

    @property
    def is_quiet(self) -> bool:
        """Whether the engine does nothing."""
        planner = None if self._probe is None else self._probe.planner
        return planner is not None and not planner.num_open and not self.engine.is_anything_under_way

    async def start(self) -> None:
        """Load, and go on with the streams of the life before."""
        await self.engine.supervisor.start()
        self._living: AsyncIterator[None] = self.streams.live(web.Application())
        await anext(self._living)
        self.is_up = True

    def kill(self) -> None:
        """End at once: nothing is written any more."""
        self.is_up = False
        self.journal._is_closed = self.journal._is_due = True
        self.journal._threads.shutdown(wait=False)
        if self.journal._timer is not None:
            self.journal._timer.cancel()
        total = self._setup.num_pages
        self._ledger.note("pages", pool=POOL, counts=[total, 0, 0, 0], total=total)

    async def answer(self, connection: ClientConnection, stream_id: str, body: bytes, num_events: int) -> None:
        """Answer a client.  body: of its request, b'' to rejoin its stream.  num_events: that it has of it."""
        headers = {LAST_EVENT_ID: f"{stream_id}:{num_events}"} if num_events else {}
        request = make_mocked_request(
            "POST" if body else "GET", PATH if body else f"/v1/streams/{stream_id}", headers, version=HttpVersion10,
            match_info={"id": stream_id}, writer=ClientWriter(connection.write), loop=asyncio.get_running_loop(),
        )  # fmt: skip
        protocol: Any = request.protocol
        protocol.transport, protocol.writing_paused = connection, False
        request[EXCHANGE] = exchange = Exchange(stream_id, "client")
        exchange.route = PATH
        request[CLIENT] = self.clients.request(exchange)
        try:
            if not body:
                await self.streams.rejoin(request)
            elif await self.streams.answer(request, body, await self._route.understand(body, exchange)) is None:
                raise RequestError("the journal takes no stream now", status=503, code="not_kept")
        except RequestError as error:
            connection.error = error
        finally:
            request[CLIENT].close()
            connection.cut()

    def _new_planner(self, num_pages: int) -> Planner:
        device = self.engine.device
        planner = build_planner(self._setup, num_pages, asyncio.get_running_loop().time, None)
        self._probe = Probe(
            planner, self._mark, device.poison, device.will_save, device.states.lose, self._setup.overlap
        )
        return planner

    def _flush(self, flush: Callable[[], None]) -> None:
        flush()
        if self._probe is not None:
            counts, total = list(self._probe.page_counts), self._probe.num_pages
            self._ledger.note_change("pages", pool=POOL, counts=counts, total=total)
