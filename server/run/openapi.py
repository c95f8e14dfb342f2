"""GET /openapi.json: what the API takes and gives, generated from the types that decode and encode it.

Owns: the document's form.  Does not know: routes, which declare their types themselves.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from server.http.operation import Operation, operation
from server.http.sse import EVENT_STREAM, LINES

REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
BINARY = "application/octet-stream"
MULTIPART = "multipart/form-data"
ERRORS = {
    "400": "A value or the body is wrong; param names the field.",
    "401": "The API key is missing or wrong.",
    "403": "A page of another site, or a key that is not an operator's.",
    "404": "There is no such model, file, batch or response.",
    "408": "The body did not arrive in time.",
    "409": "The request was aborted; what it names is in use or has ended.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or compressed.",
    "429": "Too many requests are open; see Retry-After.",
    "500": "The server failed.",
    "503": "The server cannot take requests now; see Retry-After.",
    "504": "The request took too long.",
    "507": "The server's disk is full.",
}


def document(version: str, operations: Iterable[Operation]) -> dict[str, Any]:
    """Returns the OpenAPI document."""
    documented = [one for one in operations if one.summary]
    named = (kind for one in documented for kind in (one.answer, one.body, one.event, one.error))
    kinds = list(dict.fromkeys(kind for kind in named if kind is not None))
    # A field that is sent only sometimes is one that need not be there: msgspec's schema says so by itself.
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    by_kind = dict(zip(kinds, references, strict=True))
    paths: dict[str, Any] = {}
    for one in documented:
        paths.setdefault(one.name, {})[one.methods[0].lower()] = _operation(one, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "callboard", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(one: Operation, by_kind: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {} if one.answer is None else {JSON: {"schema": by_kind[one.answer]}}
    if one.answer is bytes:
        answers = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
    if one.event is not None:
        kind = LINES if one.framing == "lines" else EVENT_STREAM
        answers[kind] = {"schema": _part_of_stream(one, {"anyOf": [by_kind[one.event], by_kind[one.error]]})}
    failed = {JSON: {"schema": by_kind[one.error]}}
    described: dict[str, Any] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": "Done.", "content": answers},
            **{status: {"description": why, "content": failed} for status, why in ERRORS.items()},
        },
    }
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": by_kind[one.body]}}}
    if one.form is not None:
        described["requestBody"] = {"required": True, "content": {MULTIPART: {"schema": one.form}}}
    if "{id}" in one.name:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _part_of_stream(one: Operation, content: dict[str, Any]) -> dict[str, Any]:
    if one.framing == "lines":
        return content
    told = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    data = told if one.framing == "events" else {"anyOf": [{"const": "[DONE]"}, told]}
    return {"type": "object", "properties": {"data": data, "event": {"type": "string"}}, "required": ["data"]}


class OpenApiRoute:
    """Handles GET /openapi.json."""

    def __init__(self, version: str, operations: Iterable[Operation]) -> None:
        self._body = msgspec.json.encode(document(version, operations))

    @operation("GET", "/openapi.json", "client")
    async def get(self, request: web.Request) -> web.Response:
        return web.Response(body=self._body, content_type=JSON)
