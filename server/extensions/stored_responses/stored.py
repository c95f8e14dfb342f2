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
from http import HTTPStatus
from typing import Any

from aiohttp import web
from msgspec import structs

from engine.settings.sections import ServerSection
from engine.types.errors import CallboardError, FieldError, RequestError
from engine.types.params import MAX_SEED
from server.clients import CLIENT, ClientRequest, Clients
from server.extensions.responses.endpoint import ResponsesWriter
from server.extensions.responses.objects import ResponseObject
from server.extensions.responses.requests import InputItem, ResponsesBody
from server.extensions.storage.files import Deleted
from server.extensions.storage.pace import Pace
from server.extensions.storage.pages import Asked, ListPage
from server.extensions.storage.routes import owner_of
from server.extensions.storage.store import QUOTA_EXCEEDED
from server.extensions.storage.unattended import ACCOUNT, unhurried, until_taken
from server.extensions.stored_responses.table import ResponseTable, input_items
from server.generate.generation import Generation, ResumePoint
from server.generate.route import GenerateRoute, GenerateTask
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE, Exchange, refuse_foreign_page
from server.http.operation import operation
from server.http.replies import as_request_error, json_reply
from server.keys import Keys

log = logging.getLogger(__name__)

ONE = "/v1/responses/{id}"
PREFIX = "resp_"
LISTED, MAX_LISTED = 20, 100
NOT_STORED = '199 callboard "the response is not stored: the disk or your part of it is full, or the disk fails"'


async def refuse_stored(request: web.Request) -> web.StreamResponse:
    """Answer whatever is asked about a response that was given before.  Raises RequestError: 404."""
    raise RequestError(
        "responses are not stored by this server; a running one ends when its connection is closed, and the operator "
        "has them stored with storage.folder, for one model",
        status=404,
        code="response_not_found",
    )


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

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, or take one for later.  Raises RequestError as any generating route, 404 and 507."""
        request[CLIENT].check_admission()
        data = await self._reader.receive(request)
        body = await self._reader.understand(data)
        if body.background and body.stream:
            reason = "not together with background: ask for the response until it is no longer in progress"
            raise FieldError("stream", reason, code="unsupported_parameter")
        if body.background and body.store is False:
            raise FieldError("store", "must be true with background, or the response could not be asked for")
        owner = owner_of(request)
        if body.background:
            request[CLIENT].admit()
        task = await self._task(owner, body, ResumePoint(), request[EXCHANGE])
        if body.store is False:
            # A stream that is kept is understood again from its body alone, which a conversation is not.
            is_whole = body.previous_response_id is None
            kept = await self._route.kept(request, data, (task.body, task.generation)) if is_whole else None
            return await self._route.reply(request, task) if kept is None else kept
        await self._table.check_room(owner, len(data))
        writer = _writer(task)
        items = input_items(_items(body), task.generation.origin.key.hex)
        if not body.background:
            storing = _Storing(self._table, owner, items, is_wanted=bool(body.store))
            writer.keep = storing.keep
            answer = await self._route.reply(request, task)
            if storing.failure is not None:
                log.warning("request=%s: its response is not stored: %s", request[EXCHANGE].id, storing.failure)
                if not answer.prepared:  # the headers of a stream are out
                    answer.headers["Warning"] = NOT_STORED
            return answer
        writer.keep = self._table.finish
        response = writer.queued()
        await self._table.add(owner, response, items, data, secrets.randbelow(MAX_SEED + 1))
        self._begin(response.id, owner)
        return json_reply(response)

    @operation("GET", ONE, "client", "A stored response.", answer=ResponseObject, off=refuse_stored)
    async def get(self, request: web.Request) -> web.Response:
        """Give a response as it is now.  Raises RequestError: 400, 404."""
        if request.query.get("stream", "false") not in ("false", "0"):
            raise FieldError("stream", "events are not stored; ask without it", code="unsupported_parameter")
        return json_reply(await self._table.get(owner_of(request), request.match_info["id"]))

    @operation("DELETE", ONE, "client", "Let go of a stored response.", answer=Deleted, off=refuse_stored)
    async def delete(self, request: web.Request) -> web.Response:
        """Let go of a response, and make it no more.  Raises RequestError: 404."""
        response_id = request.match_info["id"]
        await self._table.delete(owner_of(request), response_id)
        self._end(response_id)
        return json_reply(Deleted(response_id, "response"))

    @operation(
        "POST", ONE + "/cancel", "client", "End a response in the background.", answer=ResponseObject, off=refuse_stored
    )
    async def cancel(self, request: web.Request) -> web.Response:
        """Make a response of the background no more.  Raises RequestError: 400, 403, 404."""
        refuse_foreign_page(request)
        response_id = request.match_info["id"]
        response = await self._table.cancel(owner_of(request), response_id)
        self._end(response_id)
        return json_reply(response)

    @operation(
        "GET", ONE + "/input_items", "client", "What a response was the answer to.", answer=ListPage, off=refuse_stored
    )
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

    async def _task(
        self, owner: str, body: ResponsesBody, origin: ResumePoint, exchange: Exchange
    ) -> GenerateTask[ResponsesBody]:
        """Returns what is to be done for a body.  Raises RequestError: 400, 404."""
        # What the endpoint itself would have to refuse is done here.
        asked = structs.replace(body, previous_response_id=None, background=None)
        if body.previous_response_id is not None:
            first, before = await self._table.conversation(owner, body.previous_response_id)
            asked = structs.replace(asked, input=[*before, *_items(body)])
        elif body.store is not False:
            first = f"{PREFIX}{origin.key.hex}"  # it may be gone on from by this name
        else:
            first = ""
        exchange.offered_session = exchange.offered_session or first
        translated: Generation = await asyncio.to_thread(self._route.translate, asked)
        generation = await self._route.completed(translated, exchange)
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
        origin = ResumePoint(uuid.UUID(hex=response_id.removeprefix(PREFIX)), work.created_at, work.seed)
        task = await self._task(owner, await self._reader.understand(work.request), origin, client.exchange)
        _writer(task).keep = self._table.finish
        await self._route.whole(client, task._replace(generation=unhurried(origin, task.generation)))


class _Storing:
    """The storing of one response.  is_wanted: it was asked for, and is not the default alone.

    failure: why the response is not stored; it is sent all the same."""

    def __init__(self, table: ResponseTable, owner: str, items: list[dict[str, Any]], *, is_wanted: bool) -> None:
        self.failure: RequestError | None = None
        self._table = table
        self._owner = owner
        self._items = items
        self._is_wanted = is_wanted

    async def keep(self, response: ResponseObject) -> None:
        """Store it.  Raises RequestError, unless what is stored by default alone finds no room or a broken disk."""
        try:
            await self._table.add(self._owner, response, items=self._items)
        except RequestError as error:
            is_for_room = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == QUOTA_EXCEEDED
            if self._is_wanted or not is_for_room:
                raise
            self.failure, response.store = error, False


def _writer(task: GenerateTask[ResponsesBody]) -> ResponsesWriter:
    assert isinstance(task.writer, ResponsesWriter), "the route is that of responses"
    return task.writer


def _items(body: ResponsesBody) -> list[InputItem]:
    return [InputItem(type="message", role="user", content=body.input)] if isinstance(body.input, str) else body.input
