"""The flow of every request that generates: admit, read, translate, open, answer or stream, close.

Owns: that flow, how an error leaves it, and the engine's streams of its choices from opening to closing.
Does not know: the formats of one endpoint or the other.
Deltas of several choices come as they are produced.  The hand-over is bounded: while its reader waits for a slow
client, output stays in the engine's streams, where it merges.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import web

from engine.messages import Delta, Finish, RequestOptions
from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Prompt, RequestPart
from server.backend import EngineStream
from server.clients import CLIENT, ClientRequest
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import MAX_CHOICES, Generation, ResumePoint, choice_seed, opening_of
from server.generate.output import TOKEN_ID_BYTES, Output, PlainText, UsageCounter, by_id, is_plain
from server.generate.sight import Sight
from server.http.body import ORIGIN, BodyReader
from server.http.exchange import Exchange
from server.http.replies import json_reply
from server.http.sse import EventStream, Ping

Item = tuple[int, Delta]
B = TypeVar("B", bound=msgspec.Struct)
QUEUE_FULL = 429
ENDS_HERE_ONLY = frozenset({"engine_died", "shutting_down"})  # a router lets another replica go on


class Choices:
    """An async context manager: streams are open inside of it and closed after it, however it ends.

    At most ``MAX_CHOICES`` of them are open at once; the others follow as those before them end."""

    def __init__(self, client: ClientRequest, generation: Generation) -> None:
        """Raises RequestError if the engine refuses one of the first choices; then none is left open."""
        self._client = client
        self._generation = generation
        self.num_choices = len(generation.prompts) * generation.num_choices
        self._streams: list[EngineStream] = []
        try:
            for _ in range(min(self.num_choices, MAX_CHOICES)):
                self._open_next()
        except BaseException:
            self._close_streams()
            raise
        self._num_running = len(self._streams)
        self._items: asyncio.Queue[Item | Exception] = asyncio.Queue(maxsize=len(self._streams))
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Choices":
        if self.num_choices > 1:
            for index in range(len(self._streams)):
                self._start_pump(index)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close_streams()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def next(self) -> Item | None:
        """Returns (choice index, new output), or None when all have ended.  Raises what a choice failed with, and
        RequestError (409) for one that was aborted before all were opened."""
        if self._num_running == 0:
            return None
        if self._pumps:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
        else:
            item = 0, await self._streams[0].next()
        if item[1].finish != Finish.RUNNING:
            self._num_running -= 1
            if len(self._streams) < self.num_choices:
                if item[1].finish == Finish.ABORT:
                    raise RequestError("the request was aborted", status=409, code="aborted")
                self._client.choice_ended()
                self._follow()
        return item

    async def relay(self, sink: Callable[[int, Delta], bool], drained: Callable[[], Awaitable[None]]) -> None:
        """Give what is left to ``sink``, as (choice index, new output), in the moment it is produced.

        sink: returns whether it could take more now; if not, ``drained`` is waited for.  Raises as ``next`` does."""
        if not self._pumps:
            take = partial(sink, 0)
            while self._num_running:
                if await self._streams[0].relay(take):
                    self._num_running = 0
                else:
                    await drained()
        while (item := await self.next()) is not None:
            if not sink(*item):
                await drained()

    def _open_next(self) -> None:
        generation = self._generation
        number, k = divmod(len(self._streams), generation.num_choices)
        params, options = generation.params, generation.options
        if generation.of_prompts:
            params, options = generation.of_prompts[number]
        if k:
            params = params.replace(seed=choice_seed(params.seed, k))
        if generation.origin.seed is not None:
            params, options = _as_elsewhere(generation.origin, len(self._streams), params, options)
        self._streams.append(self._client.open(generation.prompts[number], params, options))

    def _follow(self) -> None:
        """Open choices in the place of those that have ended.

        Raises RequestError if the engine refuses one; where it is full, that is only if none of them runs."""
        try:
            while self._num_running < MAX_CHOICES and len(self._streams) < self.num_choices:
                self._open_next()
                self._num_running += 1
                self._start_pump(len(self._streams) - 1)
        except RequestError as error:
            if error.status != QUEUE_FULL or not self._num_running:
                raise

    def _start_pump(self, index: int) -> None:
        pump = asyncio.create_task(self._pump(index, self._streams[index]), name=f"choice-{index}")
        self._pumps.append(pump)

    async def _pump(self, index: int, stream: EngineStream) -> None:
        try:
            delta = await stream.next()
            while delta.finish == Finish.RUNNING:
                await self._items.put((index, delta))
                delta = await stream.next()
            await self._items.put((index, delta))
        except Exception as error:  # raised again by next(), in the task that serves the client
            await self._items.put(error)

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()


class Keeper(Protocol):
    """Keeps streams beyond their connection."""

    async def answer(self, request: web.Request, body: bytes, understood: Any) -> web.StreamResponse | None:
        """Answer a request for a stream.  Returns None for one that it does not keep."""


class GenerateTask(NamedTuple, Generic[B]):
    """A body that was understood, and what is made for its answer."""

    body: B
    generation: Generation
    usage: UsageCounter
    writer: Writer


class GenerateRoute(Generic[B]):
    """Handles the requests of one endpoint.  keeper: of its streams; None where they end with their connection.
    sight: of its conversations; None where the model reads text alone.  ping: of its streams.
    session_parts: gives the parts of a request in a session that is named.
    more_parts: gives further parts of a request, by its body; None where there are none."""

    def __init__(self, endpoint: Endpoint[B], server: ServerSection) -> None:
        self.endpoint = endpoint
        self.ping = Ping(endpoint.ping, server.ping_after_s)
        self.keeper: Keeper | None = None
        self.sight: Sight | None = None
        self.session_parts: Callable[[str], dict[str, RequestPart]] | None = None
        self.more_parts: Callable[[bytes, web.Request], dict[str, RequestPart]] | None = None
        self._reader = BodyReader(endpoint.body_type, self._understand, server, elsewhere=endpoint.elsewhere)

    async def read(self, body: bytes) -> tuple[B, Generation]:
        return await self._reader.understand(body)

    async def understand(self, body: bytes, exchange: Exchange) -> tuple[B, Generation]:
        """Returns a body as its type, and what it asks for.  exchange: of its request.  Raises RequestError."""
        understood, generation = await self.read(body)
        return understood, await self.completed(generation, exchange)

    async def completed(self, generation: Generation, exchange: Exchange) -> Generation:
        """Returns what is asked for with its pictures read, in the offered session if no field names one.

        Raises RequestError."""
        name = exchange.offered_session
        if name and not generation.session and self.session_parts is not None:
            generation = msgspec.structs.replace(generation, session=name).with_parts(self.session_parts(name))
        if self.sight is None:
            return generation
        prompts = [await _seen(prompt, self.sight, exchange) for prompt in generation.prompts]
        return msgspec.structs.replace(generation, prompts=tuple(prompts))

    def _understand(self, body: B) -> tuple[B, Generation]:
        return body, self.translate(body)

    def translate(self, body: B) -> Generation:
        """Returns what a body asks for.  Raises RequestError with the names that its clients know."""
        try:
            return self.endpoint.translate(body)
        except RequestError as error:
            raise self.renamed(error, body) from None

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Answer a request.  Raises RequestError or EngineDied as long as nothing was sent."""
        request[CLIENT].check_admission()
        raw = await self._reader.receive(request)
        body, generation = await self.understand(raw, request[CLIENT].exchange)
        if self.more_parts is not None:
            generation = generation.with_parts(self.more_parts(raw, request))
        if ORIGIN in request:
            generation = self._with_origin(generation, request[ORIGIN])
            request[CLIENT].exchange.tells_usage = True
        elif (kept := await self.kept(request, raw, (body, generation))) is not None:
            return kept
        del raw  # a stream may take long
        return await self.reply(request, self.task(body, generation))

    async def kept(
        self, request: web.Request, raw: bytes, understood: tuple[B, Generation]
    ) -> web.StreamResponse | None:
        """Answer a request by what keeps streams; returns None if nothing does.  Raises as ``post`` does."""
        if not understood[1].stream or self.keeper is None:
            return None
        return await self.keeper.answer(request, raw, understood)

    async def answer(self, client: ClientRequest, body: bytes, amend: Callable[[Generation], Generation]) -> object:
        """Returns the answer to a body that came by no connection of its own.  Raises as ``post`` does.

        amend: makes the generation what the caller wants of it."""
        client.check_admission()
        understood, generation = await self.understand(body, client.exchange)
        if generation.stream:
            raise FieldError("stream", "must be false here, where an answer comes in one piece")
        return await self.whole(client, self.task(understood, amend(generation)))

    def task(self, body: B, generation: Generation) -> "GenerateTask[B]":
        """Returns what is to be done for a body."""
        usage = UsageCounter(generation)
        return GenerateTask(body, generation, usage, self.endpoint.writer(body, generation, usage))

    async def whole(self, client: ClientRequest, task: "GenerateTask[B]") -> object:
        """Do it; returns the answer in one piece.  Raises as ``post`` does."""
        async with self._opened(client, task) as choices:
            answer = task.writer.whole(await _collect(choices, task.generation, task.usage))
            if task.writer.kept is not None:
                await task.writer.kept()
            return answer

    async def reply(self, request: web.Request, task: "GenerateTask[B]") -> web.StreamResponse:
        """Do it, and answer a request with it, or with its stream.  Raises as ``post`` does."""
        body, generation, usage, writer = task
        client = request[CLIENT]
        if not generation.stream:
            return json_reply(await self.whole(client, task))
        async with self._opened(client, task) as choices:
            events = EventStream(request, framing=self.endpoint.operation.framing, ping=self.ping)

            def last_word(error: RequestError) -> msgspec.Struct:
                if generation.origin.seed is not None and error.code in ENDS_HERE_ONLY:
                    events.cut()
                return writer.failure(self.renamed(error, body, generation))

            return await events.carry(send_all(events, writer, choices, generation, usage), last_word)

    @asynccontextmanager
    async def _opened(self, client: ClientRequest, task: "GenerateTask[B]") -> AsyncIterator[Choices]:
        body, generation, usage, writer = task
        exchange = client.exchange
        exchange.names |= {writer.id, generation.request_id} - {""}
        exchange.parts = writer.parts
        exchange.notes, exchange.session = generation.notes, generation.session
        if generation.session:
            exchange.opening = opening_of(generation)
        try:
            async with Choices(client, generation) as choices:
                try:
                    yield choices
                finally:
                    total = usage.total()
                    exchange.cached_tokens = total.prompt_tokens_details.cached_tokens
                    exchange.created_tokens = sum(usage.created_tokens)
                    client.used(usage.prompt_tokens, total.completion_tokens)
        except RequestError as error:
            raise self.renamed(error, body, generation) from None

    def _with_origin(self, generation: Generation, raw: msgspec.Raw) -> Generation:
        """Returns the generation as the router wants it.  Raises RequestError: 400, or 409 if it cannot go on here."""
        try:
            origin = msgspec.json.decode(raw, type=ResumePoint)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestError(f"not what a router sends: {error}", code="malformed_json") from None
        if any(len(one.tokens) % TOKEN_ID_BYTES for one in origin.told.values()):
            raise RequestError("not what a router sends: token ids are int32", code="malformed_json")
        if origin.told:
            asked = [params for params, _ in generation.of_prompts] or [generation.params]
            if any(
                one.prompt_logprobs is not None or (one.logprobs is not None and self.endpoint.repeats_logprobs)
                for one in asked
            ):
                reason = "log probabilities that came before are sent again later, and no other replica has them"
                raise RequestError(reason, status=409, code="not_resumable")
        return msgspec.structs.replace(generation, origin=origin)

    def renamed(self, error: RequestError, body: B, generation: Generation | None = None) -> RequestError:
        """Returns the error with its field named as this endpoint's clients know it, in its message as well."""
        if error.param == "grammar" and generation is not None:
            error.param = generation.grammar_field
        if error.param is not None:
            name = self.endpoint.rename(error.param, body)
            if error.message.startswith((f"{error.param}:", f"{error.param}=")):
                error.message = name + error.message.removeprefix(error.param)
            error.param = name
        return error


async def _seen(prompt: Prompt, sight: Sight, exchange: Exchange) -> Prompt:
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatTurn):
        return await sight.read(prompt, exchange)
    return prompt


def _as_elsewhere(
    origin: ResumePoint, index: int, params: SamplingParams, options: RequestOptions
) -> tuple[SamplingParams, RequestOptions]:
    """Returns what a choice asks so that it draws as on any other replica, and goes on from what the client has of
    it."""
    if params.seed is None:
        params = params.replace(seed=choice_seed(origin.seed, index))
    if index in origin.told:
        options = msgspec.structs.replace(options, resumed=origin.told[index].resumed)
    return params, options


def _mark(generation: Generation, index: int, delta: Delta, num_events: int) -> bytes:
    """Returns the comment by which a router notes how far the client has got, once it has passed the events on.

    It says: choice, token ids, finish, tokens of its prompt if no other choice has sent them, events."""
    counted = delta.usage is not None and index % generation.num_choices == 0
    num_prompt = delta.usage.prompt_tokens if delta.usage is not None and counted else 0
    return b": %d %b %d %d %d\n\n" % (index, delta.token_ids.hex().encode(), delta.finish, num_prompt, num_events)


async def _collect(choices: Choices, generation: Generation, usage: UsageCounter) -> list[Output]:
    outputs = [Output(index) for index in range(choices.num_choices)]
    while (item := await choices.next()) is not None:
        index, delta = item
        usage.add(index, delta)
        outputs[index].add(by_id(delta) if generation.names_tokens_by_id else delta)
    return outputs


class Outputs(Protocol):
    """The source of the output of all choices: ``Choices``, or what has written theirs down."""

    async def next(self) -> Item | None: ...

    async def relay(self, sink: Callable[[int, Delta], bool], drained: Callable[[], Awaitable[None]]) -> None: ...


async def send_all(
    events: EventStream, writer: Writer, choices: Outputs, generation: Generation, usage: UsageCounter
) -> None:
    """Send the events of all output.  Raises what that raises, and ConnectionError when the client is gone."""
    plain: dict[int, PlainText | None] = {}
    origin = generation.origin
    known_ends = {index for index, told in origin.told.items() if told.ended}

    def news(index: int, delta: Delta) -> tuple[list[msgspec.Struct], bytes]:
        usage.add(index, delta)
        told = writer.events(index, by_id(delta) if generation.names_tokens_by_id else delta)
        if origin.seed is None:
            return told, b""
        if delta.resumed or index in known_ends:
            writer.go_on_after(origin.told[index].num_events)
            return [], b""
        return told, _mark(generation, index, delta, len(told))

    def send_now(index: int, delta: Delta) -> bool:
        if (template := plain.get(index)) is not None and is_plain(delta):
            usage.add(index, delta)
            mark = _mark(generation, index, delta, 1) if origin.seed is not None else b""
            return events.write_now(template.event(delta) + mark)
        told, mark = news(index, delta)
        if index not in plain and not delta.finish and index not in known_ends:
            # From its second event on, a choice has nothing more to open with.
            plain[index] = writer.plain(index)
        return events.send_now(told, mark) if told or mark else True

    while not events.started and (item := await choices.next()) is not None:
        told, mark = news(*item)
        if told or mark:
            await events.send(told, mark)
    await choices.relay(send_now, events.drained)
    told = writer.last_events()
    if writer.kept is not None:
        await writer.kept()
    if told:
        await events.send(told)
