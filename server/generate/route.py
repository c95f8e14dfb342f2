"""The flow of every request that generates: admit, read, translate, open, answer or stream, close.

Owns: that flow, and how an error leaves it.  Does not know: the formats of one endpoint or the other.
"""

from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from engine.errors import RequestError
from engine.messages import Delta
from engine.sections import ServerSection
from server.clients.open_requests import CLIENT
from server.generate.choices import Choices
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, by_id
from server.generate.plain_text import PlainText, is_plain
from server.generate.usage import UsageCounter
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE
from server.http.replies import json_reply
from server.http.sse import EventStream

B = TypeVar("B", bound=msgspec.Struct)


class GenerateRoute(Generic[B]):
    """Handles the requests of one endpoint."""

    def __init__(self, endpoint: Endpoint[B], server: ServerSection) -> None:
        self._endpoint = endpoint
        self._reader = BodyReader(endpoint.body_type, self._translate, server, elsewhere=endpoint.elsewhere)

    def _translate(self, body: B) -> tuple[B, Generation]:
        try:
            return body, self._endpoint.translate(body)
        except RequestError as error:
            raise self._renamed(error, body) from None

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Answer a request.  Raises RequestError or EngineDied as long as nothing was sent."""
        client, exchange = request[CLIENT], request[EXCHANGE]
        client.check_admission()
        body, generation = await self._reader.read(request)
        usage = UsageCounter(generation)
        writer = self._endpoint.writer(body, generation, usage)
        exchange.names |= {writer.id, generation.request_id} - {""}
        try:
            async with Choices(client, generation) as choices:
                if not generation.stream:
                    return json_reply(writer.whole(await _collect(choices, generation, usage)))
                events = EventStream(request, named=self._endpoint.names_events)
                return await events.carry(
                    _send_all(events, writer, choices, generation, usage),
                    lambda error: writer.failure(self._renamed(error, body)),
                )
        except RequestError as error:
            raise self._renamed(error, body) from None
        finally:
            counts = usage.total()
            exchange.usage = counts.prompt_tokens, counts.completion_tokens

    def _renamed(self, error: RequestError, body: B) -> RequestError:
        """Returns the error with its field named as this endpoint's clients know it."""
        if error.param is not None:
            error.param = self._endpoint.rename(error.param, body)
        return error


async def _collect(choices: Choices, generation: Generation, usage: UsageCounter) -> list[Output]:
    outputs = [Output(index) for index in range(choices.num_choices)]
    while (item := await choices.next()) is not None:
        index, delta = item
        usage.add(index, delta)
        outputs[index].add(by_id(delta) if generation.names_tokens_by_id else delta)
    return outputs


async def _send_all(
    events: EventStream, writer: Writer, choices: Choices, generation: Generation, usage: UsageCounter
) -> None:
    plain: dict[int, PlainText | None] = {}

    def news(index: int, delta: Delta) -> list[msgspec.Struct]:
        usage.add(index, delta)
        return writer.events(index, by_id(delta) if generation.names_tokens_by_id else delta)

    def send_now(index: int, delta: Delta) -> bool:
        if (template := plain.get(index)) is not None and is_plain(delta):
            usage.add(index, delta)
            return events.write_now(template.event(delta))
        told = news(index, delta)
        if index not in plain and not delta.finish:
            # From its second event on, a choice has nothing more to open with.
            plain[index] = writer.plain(index)
        return events.send_now(told) if told else True

    while not events.started and (item := await choices.next()) is not None:
        if told := news(*item):
            await events.send(told)
    await choices.relay(send_now, events.drained)
    if told := writer.last_events():
        await events.send(told)
