"""Streams that outlast their connection, and the process: which client may rejoin them, from which event on, and how
long.

Owns: the runs of all journaled requests, the route to rejoin one, what is done with those of an earlier server.
Does not know: files, formats of answers.

Every event has an id, ``<stream id>:<number of the event>``.  What an event says depends on nothing but the output so
far, so a client that has the first n events: the same writer makes all of them anew, and it gets what follows the
n-th.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from engine.actors.admission import unavailable
from engine.settings.sections import StorageSection
from engine.types.errors import ConfigError, RequestError
from server.backend import EngineStream
from server.clients import CLIENT, Clients
from server.extensions.journal.events import NumberedEvents
from server.extensions.journal.journal import Entry, Journal
from server.extensions.journal.pictures import digests_of
from server.extensions.journal.records import Accepted, decode
from server.extensions.journal.run import TAKEN, Route, Run
from server.extensions.journal.settings import JournalSettings
from server.generate.generation import Generation, new_seed
from server.generate.output import UsageCounter
from server.generate.route import ENDS_HERE_ONLY, send_all
from server.http.exchange import EXCHANGE, Exchange
from server.http.operation import operation
from server.keys import Key, Keys

log = logging.getLogger(__name__)

FOLDER = "journal"
LAST_EVENT_ID = "Last-Event-ID"
LOOK_EVERY_S = 0.1
MOST_DIGITS = 18
NOT_THE_END = ENDS_HERE_ONLY | {TAKEN}  # of the stream, which is cut then
Name = tuple[str, str]  # owner, stream id


def open_streams(
    storage: StorageSection, clients: Clients, keys: Keys | None, model: Callable[[], str]
) -> "Streams | None":
    """Returns the journaled streams, if they are configured.  Raises ConfigError for a folder that cannot be used."""
    settings = JournalSettings.read(storage)
    if not settings.journal_streams:
        return None
    if not storage.folder:
        raise ConfigError("storage.journal_streams=true needs a folder for the journal: set storage.folder")
    folder = Path(storage.folder).expanduser() / FOLDER
    journal = Journal(folder, fsync=settings.fsync, most_bytes=settings.journal_mb << 20)
    return Streams(journal, clients, keys, rejoin_s=settings.rejoin_s, model=model)


async def no_streams(request: web.Request) -> web.StreamResponse:
    """Refuse to rejoin a stream where none is kept.  Raises RequestError: 404."""
    raise RequestError(
        "streams are not kept by this server: storage.journal_streams is off", status=404, code="stream_not_found"
    )


class Streams:
    """All journaled streams.  model: says the fingerprint of what answers, which settings change.  routes: path -> what
    understands its requests, to be set before anything is asked."""

    def __init__(
        self, journal: Journal, clients: Clients, keys: Keys | None, *, rejoin_s: float, model: Callable[[], str]
    ) -> None:
        self.routes: dict[str, Route] = {}
        self._journal = journal
        self._clients = clients
        self._keys = keys
        self._rejoin_s = rejoin_s
        self._model = model
        self._runs: dict[int, Run] = {}
        self._named: dict[Name, Run] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._is_leaving = False
        journal.forgotten = self._forgotten

    # ---- requests ---------------------------------------------------------------------------

    async def answer(
        self, request: web.Request, body: bytes, understood: tuple[Any, Generation]
    ) -> web.StreamResponse | None:
        """Answer a request with a stream that can be rejoined, or go on with the one that it names.

        Returns None if it is to be answered without the journal, which has no room or cannot be written.
        Raises RequestError, if nothing was sent: 404 for a stream that is not there, 409 for another one's body."""
        path = request[EXCHANGE].route
        if LAST_EVENT_ID in request.headers:
            run, num_events = self._find(request, *_read_event_id(request.headers[LAST_EVENT_ID]))
            if (run.accepted.path, run.accepted.body) != (path, body):
                reason = "the stream that Last-Event-ID names answers another request; send the body as it was"
                raise RequestError(reason, status=409, code="stream_mismatch")
            return await self._send_on(request, run, num_events)
        if not self._journal.takes(len(body)):
            return None
        return await self._send_on(request, self._begin(request, body, understood), 0)

    @operation(
        "GET",
        "/v1/streams/{id:.+}",
        "client",
        "Go on with a stream, behind Last-Event-ID.",
        event=dict[str, Any],
        off=no_streams,
    )
    async def rejoin(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: send what follows the event that Last-Event-ID names, or everything.

        Raises RequestError, if nothing was sent."""
        stream_id, num_events = request.match_info["id"], 0
        if (given := request.headers.get(LAST_EVENT_ID)) is not None:
            named, num_events = _read_event_id(given)
            if named != stream_id:
                raise RequestError("Last-Event-ID is of another stream than the path names", param=LAST_EVENT_ID)
        return await self._send_on(request, *self._find(request, stream_id, num_events))

    def gauges(self) -> Iterable[tuple[str, str, float]]:
        """Give what operators look at: name, meaning, value."""
        yield "journal_bytes", "What the journal takes on disk.", self._journal.num_bytes
        yield "journal_streams", "Streams that run with the journal.", sum(not run.ended for run in self._runs.values())
        yield "journal_streams_kept", "Streams that can be rejoined.", len(self._named)
        yield "journal_failing", "1 while the journal cannot be written.", self._journal.is_failing

    def _begin(self, request: web.Request, body: bytes, understood: tuple[Any, Generation]) -> Run:
        exchange, entry = request[EXCHANGE], self._journal.begin()
        origin = understood[1].origin
        accepted = Accepted(
            number=entry.number,
            stream_id=exchange.id,
            owner=_owner(exchange.key),
            client=exchange.client,
            path=exchange.route,
            body=body,
            seed=new_seed(),
            key=origin.key,
            created=origin.created,
            model=self._model(),
            pictures=digests_of(understood[1].prompts),
        )
        run = self._add(entry, accepted, exchange, understood, request[CLIENT].opened)
        run.start()
        return run

    def _add(
        self,
        entry: Entry,
        accepted: Accepted,
        given: Exchange,
        understood: tuple[Any, Generation],
        opened: Callable[[EngineStream], None] | None = None,
    ) -> Run:
        """Add a run.  given: what is known of the request.  Its run has one of its own, which ends with the run."""
        route, (body, generation) = self.routes[accepted.path], understood
        exchange = Exchange(accepted.stream_id, accepted.client)
        exchange.key, exchange.was_received = given.key, given.was_received
        exchange.arrived_at, exchange.received_at = given.arrived_at, given.received_at
        client = self._clients.request(exchange)
        client.opened = opened
        run = Run(self._journal, entry, accepted, route, body, generation, client)
        writer = route.endpoint.writer(body, run.generation, UsageCounter(run.generation))
        exchange.names |= {writer.id, generation.request_id} - {""}
        exchange.parts = writer.parts
        run.changed = partial(self._changed, run)
        self._runs[entry.number] = self._named[_name(run)] = run
        return run

    def _find(self, request: web.Request, stream_id: str, num_events: int) -> tuple[Run, int]:
        run = self._named.get((_owner(request[EXCHANGE].key), stream_id))
        if run is None:
            raise RequestError(
                f"there is no stream '{stream_id[:100]}' to rejoin: none of yours has this id, or it ended more than "
                f"{self._rejoin_s:g} s ago",
                status=404,
                code="stream_not_found",
            )
        return run, num_events

    async def _send_on(self, request: web.Request, run: Run, num_events: int) -> web.StreamResponse:
        route, body, generation = run.route, run.body, run.generation
        usage = UsageCounter(generation)
        writer = route.endpoint.writer(body, generation, usage)
        events = NumberedEvents(
            request,
            framing=route.endpoint.operation.framing,
            ping=route.ping,
            stream_id=run.accepted.stream_id,
            num_known=num_events,
        )
        reader = run.read()

        async def send() -> None:
            await send_all(events, writer, reader, generation, usage)
            if events.num_events < num_events:
                raise RequestError(
                    f"Last-Event-ID names event {num_events}, and the stream has {events.num_events}",
                    param=LAST_EVENT_ID,
                )

        def last_word(error: RequestError) -> Any:
            if error.code in NOT_THE_END:
                events.cut()
            return writer.failure(route.renamed(error, body, generation))

        try:
            return await events.carry(send(), last_word)
        except RequestError as error:
            raise route.renamed(error, body, generation) from None
        finally:
            run.leave(reader)
            counts = usage.total()
            request[EXCHANGE].usage = counts.prompt_tokens, counts.completion_tokens

    # ---- how long they are kept -------------------------------------------------------------

    def _changed(self, run: Run) -> None:
        """A run has begun, has ended or was refused, or its reader has come or gone."""
        number = run.entry.number
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()
        if number not in self._runs or self._is_leaving or run.is_left:
            return
        if run.is_refused:
            self._remove(number)
            self._journal.forget(run.entry)
        elif run.ended or run.reader is None:
            left_s = self._rejoin_s
            if self._named.get(_name(run)) is not run:
                left_s = 0.0  # a later one has its id, or the journal no room for it
            elif run.ended:
                left_s = min(max(run.ended_at + left_s - time.time(), 0.0), left_s)
            self._timers[number] = asyncio.get_running_loop().call_later(left_s, self._expire, run)

    def _forgotten(self, entry: Entry) -> None:
        """Drop a request that the journal has no room for.  One that runs goes on for its reader alone."""
        run = self._runs.get(entry.number)
        if run is None or run.ended:
            self._remove(entry.number)
            return
        if self._named.get(_name(run)) is run:
            del self._named[_name(run)]
        self._changed(run)

    def _expire(self, run: Run) -> None:
        self._remove(run.entry.number)
        if run.ended:
            self._journal.forget(run.entry)
        else:
            log.info("request=%s ends: its client has not come back for %g s", run.accepted.stream_id, self._rejoin_s)
            run.give_up()

    def _remove(self, number: int) -> None:
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()
        run = self._runs.pop(number, None)
        if run is not None and self._named.get(_name(run)) is run:
            del self._named[_name(run)]

    # ---- from one server to the next --------------------------------------------------------

    async def live(self, app: web.Application) -> AsyncIterator[None]:
        """While the server runs: go on with what an earlier one has left, and leave what is open to the next one."""
        resuming = asyncio.create_task(self._resume(await self._recover()), name="journal-resume")
        yield
        self._is_leaving = True
        resuming.cancel()
        for timer in self._timers.values():
            timer.cancel()
        for run in self._runs.values():
            await run.stop()
        self._journal.close()

    async def _recover(self) -> list[Run]:
        """Returns the runs that had not ended.  Those that no client may ask for are forgotten."""
        for entry in list(self._journal.entries.values()):
            accepted = decode(entry.records[0])
            assert isinstance(accepted, Accepted), "an entry begins with what was accepted"
            try:
                exchange = Exchange(accepted.stream_id, accepted.client)
                exchange.key = self._key_of(accepted)
                if accepted.model != self._model():
                    raise RequestError("another model, or another way to compute it, is served now")
                if (route := self.routes.get(accepted.path)) is None:
                    raise RequestError(f"{accepted.path} is not served now")
                self._add(entry, accepted, exchange, await route.read(accepted.body))
            except RequestError as error:
                log.warning("request=%s is not gone on with: %s", accepted.stream_id, error)
                self._journal.forget(entry)
        for run in self._runs.values():
            if run.ended:
                self._changed(run)
        return [run for run in self._runs.values() if not run.ended]

    async def _resume(self, runs: list[Run]) -> None:
        while unavailable(self._clients.ingress) is not None:  # noqa: ASYNC110 - many things make it available
            await asyncio.sleep(LOOK_EVERY_S)
        for run in runs:
            if run.entry.number in self._runs:  # else it was given up meanwhile
                run.start()
                self._changed(run)
        if runs:
            log.info("journal: %d streams of an earlier server go on", len(runs))

    def _key_of(self, accepted: Accepted) -> Key | None:
        """Returns the key that a request came with.  Raises RequestError if it opens nothing now."""
        if self._keys is not None:
            return self._keys.of_owner(accepted.owner, "stream")
        if accepted.owner:
            raise RequestError("its client had a key, and there are none now")
        return None


def _owner(key: Key | None) -> str:
    return "" if key is None else key.owner


def _name(run: Run) -> Name:
    return run.accepted.owner, run.accepted.stream_id


def _read_event_id(given: str) -> tuple[str, int]:
    """Returns (stream id, number of events).  Raises RequestError (400) for what no stream has sent."""
    stream_id, _, number = given.rpartition(":")
    if not stream_id or not (number.isascii() and number.isdecimal()) or len(number) > MOST_DIGITS:
        raise RequestError(
            f"Last-Event-ID: '{given[:100]}' is no id of an event; send the last one as it came, <stream id>:<number>",
            param=LAST_EVENT_ID,
        )
    return stream_id, int(number)
