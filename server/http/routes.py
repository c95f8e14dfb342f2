"""The routes of one application: which handler answers which operation.

Owns: the table, and the application's routes made of it.  Does not know: what an operation does.
"""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from server.http.operation import Handler, Operation, canonical, declared_by, operations_of


class Routes:
    """The table.  It is filled before the application listens."""

    def __init__(self) -> None:
        self._handlers: dict[Operation, Handler] = {}
        self._named: dict[tuple[str, str], Operation] = {}

    def __contains__(self, operation: Operation) -> bool:
        return operation in self._handlers

    def handle(self, operation: Operation, handler: Handler) -> None:
        """Have a handler answer an operation, in place of an earlier one."""
        self._handlers[operation] = handler
        for path in operation.paths:
            self._named |= dict.fromkeys(((method, canonical(path)) for method in operation.methods), operation)

    def add(self, handlers: object) -> None:
        """Have an object's methods answer the operations that they declare."""
        for name, operation in declared_by(type(handlers)):
            self.handle(operation, getattr(handlers, name))

    def replace(self, declared: Callable[..., Any], handler: Handler) -> None:
        """Have another handler answer what a method of some class declares."""
        for operation in operations_of(declared):
            self.handle(operation, handler)

    def find(self, method: str, name: str) -> Operation | None:
        """Returns the operation of a method and a resource's canonical path, if it is declared."""
        return self._named.get((method, name))

    def definitions(self) -> list[web.RouteDef]:
        """Returns the routes for an application."""
        return [
            web.RouteDef(method, path, handler, {"allow_head": False} if method == "GET" else {})
            for operation, handler in self._handlers.items()
            for path in operation.paths
            for method in operation.methods
        ]
