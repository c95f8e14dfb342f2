"""The flow of every request that generates text: read, translate, open, answer or stream, close.

Owns: that flow, ids, and how an error leaves it.  Does not know: the formats of one endpoint or the other.
"""

import time
import uuid
from copy import copy
from typing import Generic, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from engine.errors import RequestError
from engine.messages import Delta
from engine.sections import LimitsSection, ServerSection
from server.admission import refuse_early
from server.backend import Ingress
from server.generate.choices import Choices
from server.generate.endpoint import Endpoint, Head
from server.generate.generation import Generation
from server.generate.output import Cursor, Output, by_id
from server.generate.plain_text import PlainText, is_plain
from server.generate.usage import OptionalUsage, Tally
from server.http.body import BodyReader
from server.http.errors import error_body
from server.http.exchange import EXCHANGE
from server.http.sse import EventStream
from server.model_card import ModelCard
from server.reply import json_reply

B = TypeVar("B", bound=msgspec.Struct)


class GenerateRoute(Generic[B]):
    """Handles the requests of one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint[B],
        body_type: type[B],
        *,
        server: ServerSection,
        limits: LimitsSection,
        ingress: Ingress,
        card: ModelCard,
        system_fingerprint: str,
    ) -> None:
        self._endpoint = endpoint
        self._reader = BodyReader(body_type, endpoint.translate, server)
        self._limits = limits
        self._ingress = ingress
        self._card = card
        self._system_fingerprint = system_fingerprint

    async def post(self, request: web.Request) -> web.StreamResponse:
        """aiohttp's handler.  Raises RequestError or EngineDied as long as nothing was sent."""
        refuse_early(self._ingress, self._limits)
        generation = await self._reader.read(request)
        head = Head(
            id=self._endpoint.id_prefix + uuid.uuid4().hex,
            created=int(time.time()),
            model=self._card.name,
            system_fingerprint=self._system_fingerprint,
        )
        request[EXCHANGE].names |= {head.id, generation.request_id} - {""}
        try:
            async with Choices(self._ingress, generation) as choices:
                if generation.stream:
                    return await self._stream(request, generation, head, choices)
                return await self._answer(request, generation, head, choices)
        except RequestError as error:
            raise self._in_its_words(error, generation) from None

    async def _answer(
        self, request: web.Request, generation: Generation, head: Head, choices: Choices
    ) -> web.StreamResponse:
        tally = Tally(generation)
        outputs = [Output(index) for index in range(choices.num_choices)]
        try:
            while (item := await choices.next()) is not None:
                index, delta = item
                tally.add(index, delta)
                outputs[index].add(by_id(delta) if generation.names_tokens_by_id else delta)
        finally:
            usage = tally.total()
            request[EXCHANGE].usage = usage.prompt_tokens, usage.completion_tokens
        return json_reply(self._endpoint.answer(head, generation, outputs, usage))

    async def _stream(
        self, request: web.Request, generation: Generation, head: Head, choices: Choices
    ) -> web.StreamResponse:
        events = EventStream(request)
        tally = Tally(generation)
        try:
            return await events.carry(
                self._send_all(events, generation, head, choices, tally),
                lambda error: error_body(self._in_its_words(error, generation)),
            )
        finally:
            usage = tally.total()
            request[EXCHANGE].usage = usage.prompt_tokens, usage.completion_tokens

    async def _send_all(
        self, events: EventStream, generation: Generation, head: Head, choices: Choices, tally: Tally
    ) -> None:
        tools = generation.tools
        cursors = [
            Cursor(index, tools.parser() if tools else None, shows_token_ids=generation.shows_token_ids)
            for index in range(choices.num_choices)
        ]

        def chunks(index: int, delta: Delta) -> list[msgspec.Struct]:
            tally.add(index, delta)
            if not _is_news(delta):
                return []
            if generation.names_tokens_by_id:
                delta = by_id(delta)
            return self._endpoint.chunks(head, cursors[index], delta, _chunk_usage(generation, tally, index))

        templates: dict[int, PlainText | None] = {}
        is_simple = tools is None and not generation.continuous_usage

        def send_now(index: int, delta: Delta) -> bool:
            if (template := templates.get(index)) is not None and is_plain(delta):
                tally.add(index, delta)
                return events.write_now(template.event(delta))
            news = chunks(index, delta)
            if is_simple and index not in templates and not delta.finish:
                # From its second event on, a choice has nothing more to open with.
                cursor, usage = copy(cursors[index]), _chunk_usage(generation, tally, index)
                templates[index] = PlainText.like(lambda one: self._endpoint.chunks(head, cursor, one, usage))
            return events.send_now(news) if news else True

        while not events.started and (item := await choices.next()) is not None:
            if news := chunks(*item):
                await events.send(news)
        await choices.relay(send_now, events.drained)
        if generation.include_usage:
            await events.send([self._endpoint.usage_chunk(head, tally.total())])

    def _in_its_words(self, error: RequestError, generation: Generation) -> RequestError:
        """The engine says "prompt" and "max_tokens" whatever the client called them."""
        if error.param == "prompt":
            error.param = self._endpoint.prompt_field
        elif error.param == "max_tokens":
            error.param = generation.max_tokens_field
        return error


def _is_news(delta: Delta) -> bool:
    return bool(delta.text or delta.token_ids or delta.finish or delta.reasoning or delta.prompt_token_ids)


def _chunk_usage(generation: Generation, tally: Tally, index: int) -> OptionalUsage:
    if generation.continuous_usage:
        return tally.of_choice(index)
    return None if generation.include_usage else UNSET
