"""/v1/responses where responses are stored: they can be gone on from, asked for later, and made in the background.

Owns: the routes, the work in the background.  Does not know: tables, how a response is made.
A response in the background that the process did not live to finish is made again by the next one, with the seed and
the names that it had: so it becomes the same.
"""

import asyncio
import logging
import secrets
import uuid
from functools import partial

from aiohttp import web
from msgspec import structs

from engine.settings.sections import ServerSection
from engine.types.errors import CallboardError, FieldError
from engine.types.params import MAX_SEED
from server.access import access
from server.clients import CLIENT, ClientRequest, Clients
from server.generate.generation import Generation, Origin
from server.generate.pace import Pace
from server.generate.route import GenerateRoute, GenerateTask
from server.generate.unattended import ACCOUNT, unhurried, until_taken
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE, Exchange, refuse_foreign_page
from server.http.replies import as_request_error, json_reply
from server.keys import Keys
from server.responses.endpoint import ResponsesWriter
from server.responses.requests import InputItem, ResponsesBody
from server.responses.table import ResponseTable, input_items
from server.storage.files import Deleted
from server.storage.pages import Asked
from server.storage.routes import owner_of

log = logging.getLogger(__name__)

RESPONSES = "/v1/responses"
PREFIX = "resp_"
LISTED, MAX_LISTED = 20, 100
NOT_STORED = '199 callboard "the response is not stored: the disk or your part of it is full, or the disk fails"'


class StoredResponses:
    """Handles all of them.  route: what makes a response."""

    def __init__(
        self,
        table: ResponseTable,
        route: GenerateRoute[ResponsesBody],
        clients: Clients,
        keys: Keys,
        server: ServerSection,
        pace: Pace,
    ) -> None:
        self._table = table
        self._route = route
        self._clients = clients
        self._keys = keys
        self._reader = BodyReader(ResponsesBody, lambda body: body, server)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pace = pace

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes, for an application."""
        one = RESPONSES + "/{id}"
        return [
            web.post(RESPONSES, self.post),
            web.get(one, self.get),
            web.delete(one, self.delete),
            web.post(one + "/cancel", self.cancel),
            web.get(one + "/input_items", self.input),
        ]

    async def start(self) -> None:
        """Go on with what an earlier process has left."""
        for response_id, owner in await self._table.unfinished():
            self._begin(response_id, owner)

    async def stop(self) -> None:
        """Leave everything as it is stored."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- routes -----------------------------------------------------------------------------

    @access("client")
    async def post(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, or take one for later.  Raises RequestError as any generating route, 404 and 507."""
        request[CLIENT].check_admission()
        data = await self._reader.receive(request)
        body = await self._reader.understand(data)
        if body.background and body.stream:
            reason = "not together with background: ask for the response until it is no longer in progress"
            raise FieldError("stream", reason, code="unsupported_parameter")
        if body.background and body.store is False:
            raise FieldError("store", "must be true with background, or nobody could ask for the response")
        owner = owner_of(request)
        if body.background:
            request[CLIENT].admit()
        task = await self._task(owner, body, Origin())
        if body.store is False:
            # A stream that is kept is understood again from its body alone, which a conversation is not.
            is_whole = body.previous_response_id is None
            kept = await self._route.kept(request, data, (task.body, task.generation)) if is_whole else None
            return await self._route.reply(request, task) if kept is None else kept
        await self._table.check_room(owner, len(data))
        writer = _writer(task)
        items = input_items(_items(body), task.generation.origin.key.hex)
        if not body.background:
            writer.keep = partial(self._table.add, owner, items=items)
            answer = await self._route.reply(request, task)
            if writer.unstored is not None:
                log.warning("request=%s: its response is not stored: %s", request[EXCHANGE].id, writer.unstored)
                if not answer.prepared:  # the headers of a stream are out
                    answer.headers["Warning"] = NOT_STORED
            return answer
        writer.keep = self._table.finish
        response = writer.queued()
        await self._table.add(owner, response, items, data, secrets.randbelow(MAX_SEED + 1))
        self._begin(response.id, owner)
        return json_reply(response)

    @access("client")
    async def get(self, request: web.Request) -> web.Response:
        """Give a response as it is now.  Raises RequestError: 400, 404."""
        if request.query.get("stream", "false") not in ("false", "0"):
            raise FieldError("stream", "events are not stored; ask without it", code="unsupported_parameter")
        return json_reply(await self._table.get(owner_of(request), request.match_info["id"]))

    @access("client")
    async def delete(self, request: web.Request) -> web.Response:
        """Let go of a response, and make it no more.  Raises RequestError: 404."""
        response_id = request.match_info["id"]
        await self._table.delete(owner_of(request), response_id)
        self._end(response_id)
        return json_reply(Deleted(response_id, "response"))

    @access("client")
    async def cancel(self, request: web.Request) -> web.Response:
        """Make a response of the background no more.  Raises RequestError: 400, 403, 404."""
        refuse_foreign_page(request)
        response_id = request.match_info["id"]
        response = await self._table.cancel(owner_of(request), response_id)
        self._end(response_id)
        return json_reply(response)

    @access("client")
    async def input(self, request: web.Request) -> web.Response:
        """List what a response was the answer to, the last first.  Raises RequestError: 400, 404."""
        asked = Asked.by(request.query, default=LISTED, most=MAX_LISTED)
        items = await self._table.input(owner_of(request), request.match_info["id"])
        if asked.descending:
            items.reverse()
        ids: list[str] = [item["id"] for item in items]
        if asked.after and asked.after not in ids:
            raise FieldError("after", "no item of this response is called so")
        begin = ids.index(asked.after) + 1 if asked.after else 0
        return json_reply(asked.page(ids[begin:], items[begin:]))

    # ---- work -------------------------------------------------------------------------------

    async def _task(self, owner: str, body: ResponsesBody, origin: Origin) -> GenerateTask[ResponsesBody]:
        """Returns what is to be done for a body.  Raises RequestError: 400, 404."""
        # What the endpoint itself would have to refuse is done here.
        asked = structs.replace(body, previous_response_id=None, background=None)
        if body.previous_response_id is not None:
            before = await self._table.conversation(owner, body.previous_response_id)
            asked = structs.replace(asked, input=[*before, *_items(body)])
        generation: Generation = await asyncio.to_thread(self._route.translate, asked)
        return self._route.task(body, structs.replace(generation, origin=origin))

    def _begin(self, response_id: str, owner: str) -> None:
        task = self._tasks[response_id] = asyncio.create_task(self._make(response_id, owner), name=response_id)
        task.add_done_callback(lambda _: self._tasks.pop(response_id))

    def _end(self, response_id: str) -> None:
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    async def _make(self, response_id: str, owner: str) -> None:
        """Make a response and store it, whatever becomes of it."""
        exchange = Exchange(name=f"req-{response_id.removeprefix(PREFIX)}", address="background")
        try:
            await until_taken(partial(self._attempt, exchange, owner, response_id))
        except Exception as error:
            if not isinstance(error, CallboardError):
                log.exception("request=%s failed", exchange.id)
            await self._table.fail(response_id, as_request_error(error))

    async def _attempt(self, exchange: Exchange, owner: str, response_id: str) -> None:
        def new_client() -> ClientRequest:
            exchange.key = self._keys.of_owner(owner, "response")  # of now: a response may have waited for its turn
            return self._clients.request(exchange, ACCOUNT.format(client=exchange.client))

        await self._pace.run(owner, new_client, partial(self._work, owner, response_id))

    async def _work(self, owner: str, response_id: str, client: ClientRequest) -> None:
        client.check_admission()
        if (work := await self._table.begin(response_id)) is None:
            return
        origin = Origin(uuid.UUID(hex=response_id.removeprefix(PREFIX)), work.created_at, work.seed)
        task = await self._task(owner, await self._reader.understand(work.request), origin)
        _writer(task).keep = self._table.finish
        await self._route.whole(client, task._replace(generation=unhurried(origin, task.generation)))


def _writer(task: GenerateTask[ResponsesBody]) -> ResponsesWriter:
    assert isinstance(task.writer, ResponsesWriter), "the route is that of responses"
    return task.writer


def _items(body: ResponsesBody) -> list[InputItem]:
    return [InputItem(type="message", role="user", content=body.input)] if isinstance(body.input, str) else body.input
