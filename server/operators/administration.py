"""POST /abort_request and /reset_prefix_cache: for operators, routers and benchmarks.

Owns: their bodies.  Does not know: how requests end, what is cached.
With several API keys each reaches only what is its own: its requests, and the prefixes cached for it.  An operator's
ends requests of every client.
"""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.clients import Clients
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE, refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.requests import Short

Names = Annotated[list[Short], Meta(max_length=1024)]


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to end.  rid, request_ids: the X-Request-Id of a request, or the id in its answer.

    Several requests may have the same one.  abort_all: all of them."""

    rid: Short | Names | None = None
    request_ids: Names | None = None
    abort_all: bool | None = None


class AbortAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome.  num_aborted: requests that were open.  unknown: names that no open request has."""

    num_aborted: int
    unknown: list[str]


class ResetAnswer(msgspec.Struct, frozen=True):
    """Says that the cache was reset."""

    success: bool = True


class AdministrationRoutes:
    """Handles both."""

    def __init__(self, clients: Clients, server: ServerSection) -> None:
        self._clients = clients
        self._abort_reader = BodyReader(AbortBody, _names, server)

    @operation(
        "POST",
        "/abort_request",
        "client",
        "End requests.",
        also=("/abort_requests",),
        answer=AbortAnswer,
        body=AbortBody,
    )
    async def abort(self, request: web.Request) -> web.Response:
        """End the requests that have a name.  Raises RequestError: 404 if none has."""
        names = await self._abort_reader.read(request)
        key = request[EXCHANGE].key
        num_aborted, unknown = 0, []
        for name in names:
            num_ended = self._clients.abort(key, name)
            num_aborted += num_ended
            if name is not None and not num_ended:
                unknown.append(name)
        if unknown and not num_aborted:
            raise RequestError(
                "no open request has this id; it may have ended", status=404, code="request_not_found", param="rid"
            )
        return json_reply(AbortAnswer(num_aborted=num_aborted, unknown=unknown))

    @operation(
        "POST",
        "/reset_prefix_cache",
        "client",
        "Forget what is cached.",
        also=("/flush_cache",),
        answer=ResetAnswer,
    )
    async def reset(self, request: web.Request) -> web.Response:
        """Forget what is cached for the client.  The request's body is not read.  Raises RequestError: 403."""
        refuse_foreign_page(request)
        self._clients.forget_cache(request[EXCHANGE].key)
        return json_reply(ResetAnswer())


def _names(body: AbortBody) -> list[str | None]:
    """Returns the names without repetition; None stands for all requests.  Raises RequestError if there is none."""
    if body.abort_all:
        return [None]
    rid = [body.rid] if isinstance(body.rid, str) else body.rid or []
    names = list(dict.fromkeys([*rid, *(body.request_ids or [])]))
    if not names or not all(names):
        raise FieldError("rid", "the id of a request is needed, or abort_all")
    return [*names]
