"""The declaration of a route, made once and beside its handler: its names, its access, its body and its answer.

Owns: what is declared, and how a handler carries its declaration.  Does not know: which routes there are, what they do.
Every list of routes is a filter over declarations: keys, OpenAPI, routers, batches, traces and the access log.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from server.http.replies import ErrorBody

Access = Literal["open", "client", "operator"]
Framing = Literal["data", "events", "lines"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
H = TypeVar("H", bound=Callable[..., Any])
DECLARED = "declared_operations"
PATTERN = re.compile(r"\{(\w+):[^}]*\}")


@dataclass(frozen=True, eq=False)
class Operation:
    """A route under all its names.

    method: one, or several divided by spaces, of which the first is documented.
    path: as aiohttp has it.  also: other paths of the same route.
    access: 'open' needs no key; 'client' needs any; 'operator' needs an operator's, where operators have keys.
    summary: of the OpenAPI document; '' leaves the route out of it.
    answer: the type of what comes in one piece; None for a stream alone.  event: the parts of its stream.
    framing: 'data' is server-sent events with "[DONE]" at the end; with 'events' each has its type beside it, and no
    word of its own ends the stream; 'lines' is JSON, a line each, which a router cannot let go on elsewhere.
    body: the type of the request's JSON.  form: the fields of a body that has a file, as OpenAPI has them.
    error: the body of its errors.
    gathered: any engine may have what it asks for, so a router asks all of them.
    generates: it costs tokens, so a router counts it.  in_batches: a line of a batch may ask for it.
    span: what OpenTelemetry's conventions call its work.  polled: it is asked every second, and seldom logged.
    off: answers where its part of the server is off, and where several engines are behind one address.
    replicated: answers in place of ``off`` where these are engines of one model."""

    method: str
    path: str
    access: Access
    summary: str = ""
    also: tuple[str, ...] = ()
    answer: Any = None
    body: type[msgspec.Struct] | None = None
    event: Any = None
    framing: Framing = "data"
    error: type[msgspec.Struct] = ErrorBody
    form: dict[str, Any] | None = None
    gathered: bool = False
    generates: bool = False
    in_batches: bool = False
    span: str = ""
    polled: bool = False
    off: Handler | None = None
    replicated: Handler | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods.  A GET that stands behind a POST acts, so it has no HEAD beside it."""
        methods = tuple(self.method.split())
        return (*methods, "HEAD") if methods[0] == "GET" else methods

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths."""
        return self.path, *self.also

    @property
    def name(self) -> str:
        """The path as aiohttp's resources, the log and the OpenAPI document have it."""
        return canonical(self.path)


def canonical(path: str) -> str:
    """Returns a path without the patterns of its parts."""
    return PATTERN.sub(r"{\1}", path)


def operation(method: str, path: str, access: Access, summary: str = "", **more: Any) -> Callable[[H], H]:
    """Returns a decorator that declares a method to be the handler of a route; it may have several."""

    def declare(handler: H) -> H:
        declared = Operation(method, path, access, summary, **more)
        vars(handler)[DECLARED] = (declared, *operations_of(handler))
        return handler

    return declare


def generating(path: str, summary: str, **more: Any) -> Operation:
    """Returns the declaration of a route that costs tokens, which any client may call."""
    return Operation("POST", path, "client", summary, generates=True, **more)


def operations_of(handler: Callable[..., Any]) -> tuple[Operation, ...]:
    """Returns what is declared of a handler."""
    declared: tuple[Operation, ...] = getattr(handler, DECLARED, ())
    return declared


def declared_by(kind: type) -> Iterator[tuple[str, Operation]]:
    """Give (name of the method, operation) for every handler of a class, in the order of its source."""
    for base in reversed(kind.__mro__):
        for name, handler in vars(base).items():
            if callable(handler):
                yield from ((name, one) for one in operations_of(handler))
