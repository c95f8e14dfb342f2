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
from engine.control.changeover import TAGS, Outcome
from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.backend import Backend, Operations
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE, refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply

LEVELS: dict[str, Literal[1, 2]] = {"1": 1, "2": 2}


class ApplyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings to have.

    toml: a whole configuration file, which changes no place; without it, the server's own file is read again.

    dry_run: only say what would change."""

    toml: Annotated[str, Meta(max_length=MAX_FILE_BYTES)] | None = None
    dry_run: bool = False


class Sleeping(msgspec.Struct, frozen=True):
    """Whether the engine sleeps."""

    is_sleeping: bool


async def refuse_settings(request: web.Request) -> web.StreamResponse:
    """Refuse what is for one engine, where several are served.  Raises RequestError: 404."""
    raise _operations_off()


def _operations_off() -> RequestError:
    reason = "one of several engines goes on as it was started; restart it to change that"
    return RequestError(reason, status=404, code="operations_off")


class SettingsRoutes:
    """Handles these routes."""

    def __init__(self, backend: Backend, server: ServerSection) -> None:
        self._backend = backend
        self._reader = BodyReader(
            ApplyBody, lambda body: Operate(what="apply", text=body.toml, dry_run=body.dry_run), server
        )

    @operation(
        "POST", "/apply", "operator", "Change the settings.", answer=Outcome, body=ApplyBody, off=refuse_settings
    )
    async def apply(self, request: web.Request) -> web.Response:
        """Returns what has changed.  Raises RequestError: 400 for settings that cannot be, with their names."""
        ask = await self._reader.read(request)
        outcome = msgspec.json.decode(await self._operations.operate(ask), type=Outcome)
        request[EXCHANGE].changed = tuple(one.key for one in outcome.changes) if outcome.applied else ()
        return json_reply(outcome)

    @operation("POST", "/sleep", "operator", "Let the engine rest.", answer=Sleeping, off=refuse_settings)
    async def sleep(self, request: web.Request) -> web.Response:
        """Returns when the engine sleeps.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        if (level := LEVELS.get(given := request.query.get("level", "1"))) is None:
            raise FieldError("level", f"expected 1 or 2, not {given!r:.20}")
        await self._operations.operate(Operate(what="sleep", level=level, tags=_tags(request)))
        return json_reply(Sleeping(True))

    @operation("POST", "/wake_up", "operator", "End that.", answer=Sleeping, off=refuse_settings)
    async def wake_up(self, request: web.Request) -> web.Response:
        """Returns when the engine takes requests again.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        await self._operations.operate(Operate(what="wake_up", tags=_tags(request)))
        return json_reply(Sleeping(await self._is_sleeping()))

    @operation("GET", "/is_sleeping", "operator", "Whether it rests.", answer=Sleeping)
    async def is_sleeping(self, request: web.Request) -> web.Response:
        return json_reply(Sleeping(await self._is_sleeping()))

    async def _is_sleeping(self) -> bool:
        ingress = self._backend.ingress
        return ingress.asleep or bool((await self._backend.monitor.look()).gauges.of_features.get("memory_released"))

    @property
    def _operations(self) -> Operations:
        if self._backend.operations is None:
            raise _operations_off()
        return self._backend.operations


def _tags(request: web.Request) -> tuple[str, ...]:
    """Return the kinds of memory that a request names.  Raises FieldError."""
    tags = tuple(request.query.getall("tags", []))
    if wrong := next((one for one in tags if one not in TAGS), None):
        raise FieldError("tags", f"expected {' or '.join(TAGS)}, not {wrong!r:.40}")
    return tags
