"""Responses in one piece of JSON, and the one shape that errors have in it, whatever their status and route.

Owns: the error body, the type that goes with a status, what an unexpected exception looks like from outside.
Does not know: requests, routes, sockets.  A body never carries a traceback or a path, nor a long echo of the input.
"""

from collections.abc import Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from engine.types.errors import EngineDied, RequestError

MAX_MESSAGE_CHARS = 400
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
ROUTING_MESSAGES = {
    404: ("no such route; GET /openapi.json lists them, and none ends in '/'", "unknown_route"),
    405: ("this route does not take that method", "method_not_allowed"),
    417: ("the only expectation this server can meet is 100-continue", "expectation_failed"),
}


def json_reply(body: object, status: int = 200) -> web.Response:
    """A response with ``body`` as its JSON."""
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


class ErrorDetail(msgspec.Struct, frozen=True):
    """The failure, and the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of an error response, and of an error inside a stream."""

    error: ErrorDetail


def error_body(error: RequestError) -> ErrorBody:
    """Returns an error as JSON has it."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return ErrorBody(ErrorDetail(message, kind, error.param, error.code))


ErrorFormat = Callable[[RequestError], msgspec.Struct]


def error_response(error: RequestError, form: ErrorFormat = error_body) -> web.Response:
    """Returns an error as an HTTP response.  form: what its body looks like."""
    response = json_reply(form(error), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 504:
        # The official clients repeat a 5xx on their own; what ran into its time limit once would do so again.
        response.headers["X-Should-Retry"] = "false"
    return response


def raw_response(error: RequestError) -> bytes:
    """Returns an error response as bytes, for a connection on which no request could be read."""
    body = msgspec.json.encode(error_body(error))
    reason = HTTPStatus(error.status).phrase
    lines = [
        f"HTTP/1.1 {error.status} {reason}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"Retry-After: {error.retry_after_s}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def as_request_error(error: Exception) -> RequestError:
    """Returns any exception as what a client may read.  What is not deliberate says nothing about its cause."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDied):
        return RequestError("the engine stopped while this request ran", status=500, code="engine_died")
    if isinstance(error, web.HTTPException):
        message, code = ROUTING_MESSAGES.get(error.status, (error.reason, "http_error"))
        return RequestError(message, status=error.status, code=code)
    return RequestError("internal error; the server log has the details", status=500, code="internal_error")
