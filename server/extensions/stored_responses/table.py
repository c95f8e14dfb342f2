"""The table of stored responses.

Owns: how a response is stored and found, and the conversation that leads to it.  Does not know: HTTP, the engine.
A response that is made while its client waits is stored when it is whole; one in the background when it is asked for.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.types.errors import RequestError
from server.extensions.responses.objects import ResponseObject
from server.extensions.responses.requests import InputItem
from server.extensions.storage.store import Connection, Store, check_quota
from server.extensions.storage.unattended import check_active

UNDER_WAY = "status IN ('queued', 'in_progress')"
WHOLE = ("completed", "incomplete")
MOST_TURNS = 10_000
CHAIN = """
WITH RECURSIVE chain (id, previous, status, input, object, depth) AS (
    SELECT id, previous, status, input, object, 1 FROM responses WHERE id = :id AND owner = :owner
    UNION ALL
    SELECT r.id, r.previous, r.status, r.input, r.object, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
    WHERE r.owner = :owner AND depth < :most
)
SELECT id, previous, status, input, object FROM chain ORDER BY depth DESC
"""


class StoredTurn(msgspec.Struct, frozen=True):
    """The turns that a stored response adds to a conversation."""

    output: list[InputItem]


class Background(msgspec.Struct, frozen=True):
    """A response to be made.  request: its body, as it came."""

    request: bytes
    created_at: int
    seed: int


class ResponseTable:
    """Responses of all owners; each sees its own alone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise RequestError (400) for more than an owner may store."""
        await self._store.run(lambda connection: check_quota(connection, self._store.settings, owner, num_bytes))

    async def add(
        self, owner: str, response: ResponseObject, items: Sequence[Any], request: bytes = b"", seed: int | None = None
    ) -> None:
        """Store a response.  items: its own input.  request, seed: of one that is to be made in the background.

        Raises RequestError: 400 beyond the owner's quota, 429 for too many of the background, 507."""
        given, body = msgspec.json.encode(items), msgspec.json.encode(response)
        row = (
            response.id,
            owner,
            response.status,
            response.background,
            response.created_at,
            response.previous_response_id,
            seed,
            request,
            given,
            body,
            len(request) + len(given) + len(body),
        )

        def work(connection: Connection) -> None:
            if request:
                query = f"SELECT count(*) FROM responses WHERE owner = ? AND {UNDER_WAY}"
                check_active("responses", connection.execute(query, (owner,)).fetchone()[0])
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO responses VALUES ({marks})", row)
            check_quota(connection, self._store.settings, owner)

        await self._store.run(work)

    async def get(self, owner: str, response_id: str) -> msgspec.Raw:
        """The object of a response.  Raises RequestError (404)."""
        return msgspec.Raw(await self._store.run(lambda connection: _find(connection, owner, response_id)[0]))

    async def input(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """Returns what a response was the answer to, without what came before.  Raises RequestError (404)."""

        def work(connection: Connection) -> list[dict[str, Any]]:
            items: list[dict[str, Any]] = msgspec.json.decode(_find(connection, owner, response_id)[1])
            return items

        return await self._store.run(work)

    async def conversation(self, owner: str, response_id: str) -> tuple[str, list[InputItem]]:
        """Return the name of a conversation's first response, and all that was said up to and with this one.

        Raises RequestError: 404 for one that is not there or goes on from such a one, 400 for one that is not whole."""

        def work(connection: Connection) -> tuple[str, list[InputItem]]:
            turns = connection.execute(CHAIN, {"id": response_id, "owner": owner, "most": MOST_TURNS}).fetchall()
            missing = response_id if not turns else turns[0][1]
            if missing is not None:
                raise _unknown(missing, "previous_response_id")
            items: list[InputItem] = []
            for name, _, status, given, body in turns:
                if status not in WHOLE:
                    raise RequestError(
                        f"previous_response_id: '{name}' is {status}; only a whole response can be gone on from",
                        param="previous_response_id",
                        code="previous_response_not_whole",
                    )
                items += msgspec.json.decode(given, type=list[InputItem])
                items += msgspec.json.decode(body, type=StoredTurn).output
            return turns[0][0], items

        return await self._store.run(work)

    async def delete(self, owner: str, response_id: str) -> None:
        """Raises RequestError (404)."""

        def work(connection: Connection) -> None:
            _find(connection, owner, response_id)
            connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))

        await self._store.run(work, frees=True)

    async def cancel(self, owner: str, response_id: str) -> msgspec.Raw:
        """Note that a response is not wanted; one that has ended stays as it is.  Raises RequestError: 400, 404."""

        def work(connection: Connection) -> msgspec.Raw:
            body, _, background = _find(connection, owner, response_id)
            if not background:
                reason = "only a response with background=true can be cancelled; close the connection of another one"
                raise RequestError(reason, code="not_in_background")
            return msgspec.Raw(_change(connection, response_id, status="cancelled") or body)

        return await self._store.run(work)

    # ---- in the background ------------------------------------------------------------------

    async def unfinished(self) -> list[tuple[str, str]]:
        """(id, owner) of those that are to be made, the oldest first."""
        query = f"SELECT id, owner FROM responses WHERE {UNDER_WAY} ORDER BY created_at, rowid"
        return await self._store.insist(lambda connection: connection.execute(query).fetchall())

    async def begin(self, response_id: str) -> Background | None:
        """Note that a response is being made; None if it is not to be made any more."""

        def work(connection: Connection) -> Background | None:
            if _change(connection, response_id, status="in_progress") is None:
                return None
            query = "SELECT request, created_at, seed FROM responses WHERE id = ?"
            return Background(*connection.execute(query, (response_id,)).fetchone())

        return await self._store.insist(work)

    async def finish(self, response: ResponseObject) -> None:
        """Store what became of a response, unless something else has become of it.

        Raises RequestError: 400 beyond the owner's quota, 507 for a disk that stays full."""
        body = msgspec.json.encode(response)

        def work(connection: Connection) -> None:
            found = connection.execute(
                f"UPDATE responses SET status = ?, object = ?, request = NULL, bytes = length(input) + ?"
                f" WHERE id = ? AND {UNDER_WAY} RETURNING owner",
                (response.status, body, len(body), response.id),
            ).fetchall()
            for (owner,) in found:
                check_quota(connection, self._store.settings, owner)

        await self._store.insist(work, gives_up=True)

    async def fail(self, response_id: str, error: RequestError) -> None:
        """Do so for one that cannot be made."""
        told = {"code": error.code, "message": error.message}
        fields = {"status": "failed", "error": told}
        await self._store.insist(lambda connection: _change(connection, response_id, **fields), frees=True)


def input_items(given: Sequence[InputItem], name: str) -> list[dict[str, Any]]:
    """Returns input as it is stored and listed.  name: what the items' own names are made of."""
    return [_input_item(item, f"{name}{number:03}") for number, item in enumerate(given)]


def _input_item(item: InputItem, name: str) -> dict[str, Any]:
    kind = item.type or "message"
    told = {field: value for field, value in msgspec.to_builtins(item).items() if value is not None}
    told = {"id": f"{PREFIXES.get(kind, 'item')}_{name}", "type": kind, "status": "completed", **told}
    if kind == "message" and isinstance(item.content, str):
        text = "output_text" if item.role == "assistant" else "input_text"
        told["content"] = [{"type": text, "text": item.content}]
    return told


PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _find(connection: Connection, owner: str, response_id: str) -> tuple[bytes, bytes, int]:
    """(object, input, whether it is in the background).  Raises RequestError (404)."""
    row: tuple[bytes, bytes, int] | None = connection.execute(
        "SELECT object, input, background FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
    ).fetchone()
    if row is None:
        raise _unknown(response_id)
    return row


def _unknown(response_id: str, param: str | None = None) -> RequestError:
    return RequestError(
        f"there is no response '{response_id[:100]}'", status=404, code="response_not_found", param=param
    )


def _change(connection: Connection, response_id: str, **fields: Any) -> bytes | None:
    """Change fields of a response that has not ended; returns its object, or None if it has, or is gone."""
    row = connection.execute(f"SELECT object FROM responses WHERE id = ? AND {UNDER_WAY}", (response_id,)).fetchone()
    if row is None:
        return None
    body = msgspec.json.encode({**msgspec.json.decode(row[0]), **fields})
    connection.execute(
        "UPDATE responses SET status = ?, object = ?, bytes = length(coalesce(request, '')) + length(input) + ?"
        " WHERE id = ?",
        (fields["status"], body, len(body), response_id),
    )
    return body
