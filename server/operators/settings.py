"""POST /apply, /sleep and /wake_up, GET /is_sleeping: settings that change, and an engine that rests, while it serves.

Owns: their bodies and answers.  Does not know: what a setting means, how it is changed.
While the engine sleeps, new requests get 503 with Retry-After; those that ran go on where they were when it wakes up.
"""

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.actors.operations import Operate
from engine.config import MAX_FILE_BYTES
from engine.control.changeover import Outcome
from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.access import access
from server.backend import Backend, Operations
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE, refuse_foreign_page
from server.http.replies import json_reply

PATHS = ("/apply", "/sleep", "/wake_up")
IS_SLEEPING = "/is_sleeping"
LEVELS: dict[str, Literal[1, 2]] = {"1": 1, "2": 2}


class ApplyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """toml: a whole configuration file, which changes no place; without it, the server's own file is read again.

    dry_run: only say what would change."""

    toml: Annotated[str, Meta(max_length=MAX_FILE_BYTES)] | None = None
    dry_run: bool = False


class Sleeping(msgspec.Struct, frozen=True):
    """Whether the engine sleeps."""

    is_sleeping: bool


class SettingsRoutes:
    """Handles these routes."""

    def __init__(self, backend: Backend, server: ServerSection) -> None:
        self._backend = backend
        self._reader = BodyReader(
            ApplyBody, lambda body: Operate(what="apply", text=body.toml, dry_run=body.dry_run), server
        )

    def routes(self) -> list[web.RouteDef]:
        """Returns all of them."""
        return [
            web.post("/apply", self.apply),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get(IS_SLEEPING, self.is_sleeping),
        ]

    @access("operator")
    async def apply(self, request: web.Request) -> web.Response:
        """Returns what has changed.  Raises RequestError: 400 for settings that cannot be, with their names."""
        ask = await self._reader.read(request)
        outcome = msgspec.json.decode(await self._operations.operate(ask), type=Outcome)
        request[EXCHANGE].changed = tuple(one.key for one in outcome.changes) if outcome.applied else ()
        return json_reply(outcome)

    @access("operator")
    async def sleep(self, request: web.Request) -> web.Response:
        """Returns when the engine sleeps.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        if (level := LEVELS.get(given := request.query.get("level", "1"))) is None:
            raise FieldError("level", f"expected 1 or 2, not {given!r:.20}")
        await self._operations.operate(Operate(what="sleep", level=level))
        return json_reply(Sleeping(True))

    @access("operator")
    async def wake_up(self, request: web.Request) -> web.Response:
        """Returns when the engine takes requests again.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        await self._operations.operate(Operate(what="wake_up"))
        return json_reply(Sleeping(False))

    @access("operator")
    async def is_sleeping(self, request: web.Request) -> web.Response:
        return json_reply(Sleeping(self._backend.ingress.asleep))

    @property
    def _operations(self) -> Operations:
        if self._backend.operations is None:
            raise _operations_off()
        return self._backend.operations


@access("operator")
async def refuse_settings(request: web.Request) -> web.StreamResponse:
    """Refuse what is for one engine, where several are served.  Raises RequestError: 404."""
    raise _operations_off()


def _operations_off() -> RequestError:
    reason = "one of several engines goes on as it was started; restart it to change that"
    return RequestError(reason, status=404, code="operations_off")
