"""One journaled request: it runs whether or not a client reads it, and any of its readers gets the same events.

Owns: its output so far, which of it is written down, how it goes on from there, its reader.
Does not know: files, HTTP, how long it waits for a reader.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from engine.messages import Delta, Finish
from engine.types.errors import CallboardError, RequestError
from server.clients import ClientRequest
from server.extensions.journal.journal import Entry, Journal
from server.extensions.journal.pictures import digests_of, without_pictures
from server.extensions.journal.records import Accepted, Delivered, Ended, Failure, decode
from server.generate.endpoint import Endpoint
from server.generate.generation import DeliveredChoice, Generation, ResumePoint
from server.generate.output import UsageCounter
from server.generate.route import ENDS_HERE_ONLY, Choices, Item
from server.http.exchange import Exchange
from server.http.replies import as_request_error
from server.http.sse import Ping

log = logging.getLogger(__name__)

TAKEN = "stream_taken"
TRY_AGAIN = frozenset({429, 503})
TRY_AGAIN_EVERY_S = 0.2


class Route(Protocol):
    """A way to understand and answer the requests of a path."""

    endpoint: Endpoint[Any]
    ping: Ping

    async def read(self, body: bytes) -> tuple[Any, Generation]:
        """Returns the body as its type, and what it asks for, whose pictures are not read.  Raises RequestError."""

    async def completed(self, generation: Generation, exchange: Exchange) -> Generation:
        """Returns what is asked for with its pictures read.  exchange: of its request.  Raises RequestError."""

    def renamed(self, error: RequestError, body: Any, generation: Generation | None = None) -> RequestError:
        """Returns the error as the route's clients know it."""


class Run:
    """Make a run.

    accepted: the request.  body, generation: as its route understands it; pictures are read if it has no record yet.
    client: in whose name it runs.

    num_written: pieces of output that readers may have.  failure: what it has ended with, unless it is complete.
    is_left: it has ended here only, which is not written down, and the next server goes on with it.
    changed: called when it has ended, and when a reader comes or goes."""

    def __init__(
        self,
        journal: Journal,
        entry: Entry,
        accepted: Accepted,
        route: Route,
        body: Any,
        generation: Generation,
        client: ClientRequest,
    ) -> None:
        self.entry = entry
        self.accepted = accepted
        self.route = route
        self.body = body
        self.generation = msgspec.structs.replace(
            generation,
            prompts=tuple(map(without_pictures, generation.prompts)),
            origin=ResumePoint(accepted.key, accepted.created),
        )
        self.num_written = 0
        self.ended = False
        self.ended_at = 0.0
        self.failure: Failure | None = None
        self.is_left = False
        self.reader: Reader | None = None
        self.changed: Callable[[], None] = lambda: None
        self._journal = journal
        self._client = client
        self._prompts = generation.prompts  # with pictures, until it has ended
        self._is_seen = not entry.records
        self._usage = UsageCounter(self.generation)
        self._num_records = len(entry.records)  # written, or on their way
        self._num_gone = 0  # pieces of output that are not kept any more
        self._has_versions = False  # of weights that an update has brought to an earlier server
        self._told: dict[int, _Choice] = {}  # what was written down by an earlier server
        self._task: asyncio.Task[None] | None = None
        for record in map(decode, entry.records):
            if isinstance(record, Delivered):
                self.num_written += 1
                self._usage.add(record.index, record.delta)
                self._has_versions |= bool(record.delta.result)
                self._told.setdefault(record.index, _Choice()).add(record.delta)
            elif isinstance(record, Ended):
                self.ended, self.ended_at, self.failure = True, record.when, record.failure
                self._prompts = ()

    @property
    def is_refused(self) -> bool:
        """Whether it has ended before it was accepted, and nothing of it is written down."""
        return self.ended and not self._num_records

    # ---- its work ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run, or go on behind what was written down."""
        self._task = asyncio.create_task(self._work(), name=f"run-{self.entry.number}")

    async def stop(self) -> None:
        """End the work; what is written down stays as it is, for the next server."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    def give_up(self) -> None:
        """End the work, and write down that no client can ask for it any more."""
        if self._task is not None:
            self._task.cancel()
        if not self.ended:
            record = Ended(self.entry.number, self._num_records, time.time(), is_forgotten=True)
            self._journal.end(self.entry, record, partial(self._journal.forget, self.entry))

    async def _work(self) -> None:
        failure: Failure | None = None
        try:
            await self._generate()
        except CallboardError as error:
            failure = Failure.of(as_request_error(error))
        except Exception as error:
            log.exception("request=%s failed", self.accepted.stream_id)
            failure = Failure.of(as_request_error(error))
        finally:
            self._client.close()
        if failure is not None and failure.code in ENDS_HERE_ONLY:
            self.is_left = True
            self._has_ended(time.time(), failure)
        else:
            self._end(failure)

    async def _generate(self) -> None:
        num_choices = len(self.generation.prompts) * self.generation.num_choices
        if len(self._told) == num_choices and all(one.ended for one in self._told.values()):
            return  # only its last record is missing
        async with await self._open() as choices:
            if not self._num_records:
                self._num_records = 1
                self._journal.append(self.entry, self.accepted, _nothing)
            try:
                await choices.relay(self._take, _no_wait)
            finally:
                self._client.used(self._usage.prompt_tokens, self._usage.total().completion_tokens)

    async def _open(self) -> Choices:
        """Returns the choices, in the engine.  Raises RequestError; what an earlier server took waits for its turn."""
        told = {index: DeliveredChoice(bytes(one.tokens), ended=one.ended) for index, one in self._told.items()}
        origin = msgspec.structs.replace(self.generation.origin, seed=self.accepted.seed, told=told)
        while True:
            try:
                await self._see()
                generation = msgspec.structs.replace(self.generation, prompts=self._prompts, origin=origin)
                return Choices(self._client, generation)
            except RequestError as error:
                if not self.entry.records or error.status not in TRY_AGAIN or error.code in ENDS_HERE_ONLY:
                    raise
            await asyncio.sleep(TRY_AGAIN_EVERY_S)

    async def _see(self) -> None:
        """Read the pictures of a request that an earlier server took.

        Raises RequestError, also if one has changed, or the weights."""
        if self._is_seen:
            return
        if self._has_versions:
            raise RequestError(
                "the tokens of this stream are of weights that an update has brought, and a server that starts has "
                "those of model.path, so it does not go on; send the request again",
                status=409,
                code="weights_changed",
            )
        generation = msgspec.structs.replace(self.generation, prompts=self._prompts)
        prompts = (await self.route.completed(generation, self._client.exchange)).prompts
        if digests_of(prompts) != self.accepted.pictures:
            raise RequestError(
                "a picture of this request is another one now than when its stream began, so it does not go on; send "
                "the request again",
                status=409,
                code="picture_changed",
            )
        self._prompts, self._is_seen = prompts, True

    def _take(self, index: int, delta: Delta) -> bool:
        told = self._told.get(index)
        if told is not None:
            if delta.resumed or told.ended:
                return True  # readers have it
            if delta.prompt_logprobs:
                delta = msgspec.structs.replace(delta, prompt_logprobs=())
        record = Delivered(self.entry.number, self._num_records, index, delta)
        self._num_records += 1
        self._journal.append(self.entry, record, partial(self._was_written, index, delta))
        return True

    def _was_written(self, index: int, delta: Delta) -> None:
        self.num_written += 1
        self._usage.add(index, delta)
        if self.reader is not None:
            self.reader.take(index, delta)
            if not self.entry.is_kept:
                self._let_go(self.reader.num_read)

    def _let_go(self, num_read: int) -> None:
        """Keep nothing of what its reader has, since no other can read it."""
        records = self.entry.records
        for at in range(self._num_gone, num_read):
            records[1 + at] = b""
        self._num_gone = num_read

    def _end(self, failure: Failure | None) -> None:
        if not self._num_records:
            self._has_ended(0.0, failure)
            return
        record = Ended(self.entry.number, self._num_records, time.time(), failure)
        self._num_records += 1
        self._journal.end(self.entry, record, partial(self._has_ended, record.when, failure))

    def _has_ended(self, when: float, failure: Failure | None) -> None:
        self.ended, self.ended_at, self.failure = True, when, failure
        self._prompts = ()
        if self.reader is not None:
            self.reader.wake()
        self.changed()

    # ---- its readers ------------------------------------------------------------------------

    def read(self) -> "Reader":
        """Returns a new reader, which takes the place of the one before."""
        if self.reader is not None:
            self.reader.cut()
        self.reader = Reader(self)
        self.changed()
        return self.reader

    def leave(self, reader: "Reader") -> None:
        """A reader has gone."""
        if self.reader is reader:
            self.reader = None
            self.changed()

    def item(self, at: int) -> Item:
        """Returns the at-th piece of output: (choice index, delta)."""
        record = decode(self.entry.records[1 + at])
        assert isinstance(record, Delivered), "all between the first record and the last"
        return record.index, record.delta


class Reader:
    """Reads a run from its beginning, as ``Choices`` are read.  num_read: pieces of output that it has read."""

    def __init__(self, run: Run) -> None:
        self.num_choices = len(run.generation.prompts) * run.generation.num_choices
        self._run = run
        self.num_read = 0
        self._sink: Callable[[int, Delta], bool] | None = None
        self._error: Exception | None = None
        self._woken = asyncio.Event()

    async def next(self) -> Item | None:
        """Returns (choice index, new output), or None when all have ended.  Raises what the run has failed with, and
        RequestError (409) once another reader has taken its place."""
        while True:
            if self._error is not None:
                raise self._error
            if self.num_read < self._run.num_written:
                self.num_read += 1
                return self._run.item(self.num_read - 1)
            if self._run.ended:
                if self._run.failure is not None:
                    raise self._run.failure.error()
                return None
            self._woken.clear()
            await self._woken.wait()

    async def relay(self, sink: Callable[[int, Delta], bool], drained: Callable[[], Awaitable[None]]) -> None:
        """Give what is left to ``sink`` in the moment it is written down; see ``Choices.relay``."""
        while True:
            while self.num_read < self._run.num_written and self._error is None:
                self.num_read += 1
                if not sink(*self._run.item(self.num_read - 1)):
                    await drained()
            if self._run.ended or self._error is not None:
                await self.next()
                return
            self._woken.clear()
            self._sink = sink
            try:
                await self._woken.wait()
            finally:
                self._sink = None
            await drained()

    def take(self, index: int, delta: Delta) -> None:
        """Take more output of the run, which is written down."""
        if self._sink is None:
            self._woken.set()
            return
        self.num_read += 1
        try:
            if self._sink(index, delta):
                return
        except Exception as error:  # of its client, and no business of the run
            self._error = error
        self._sink = None
        self._woken.set()

    def wake(self) -> None:
        """Take the end of the run."""
        self._woken.set()

    def cut(self) -> None:
        """Another reader takes its place."""
        self._error = RequestError("another client has rejoined this stream", status=409, code=TAKEN)
        self._woken.set()


class _Choice:
    """A choice as far as it is written down.  tokens: int32[n]."""

    __slots__ = ("ended", "tokens")

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.ended = False

    def add(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.ended |= delta.finish != Finish.RUNNING


def _nothing() -> None:
    """Do nothing after a record that nothing waits for."""


async def _no_wait() -> None:
    """Return at once: what is written down never holds up the engine."""
