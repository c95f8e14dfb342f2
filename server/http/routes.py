"""The routes of one application: which handler answers which operation.

Owns: the table, and the application's routes made of it.  Does not know: what an operation does.
"""

from collections.abc import Callable
from typing import Any

from aiohttp import hdrs, web

from server.http.operation import Handler, Operation, canonical, declared_by, operations_of


class Routes:
    """The table, which is filled before the application listens.

    named: (method, canonical path) -> operation."""

    def __init__(self) -> None:
        self.named: dict[tuple[str, str], Operation] = {}
        self._handlers: dict[Operation, Handler] = {}
        self._refused: list[Operation] = []

    def handle(self, operation: Operation, handler: Handler) -> None:
        """Have a handler answer an operation, in place of an earlier one."""
        self._handlers[operation] = handler
        self._name(operation, operation.methods, *operation.paths)

    def refuse(self, operation: Operation) -> None:
        """Answer an operation that no handler answers by its ``off``, whatever the method and the rest of the path."""
        assert operation.off is not None, f"{operation.path} has no handler"
        self._refused.append(operation)
        self._name(operation, (hdrs.METH_ANY,), *map(_below, operation.paths))

    def add(self, handlers: object) -> None:
        """Have an object's methods answer the operations that they declare."""
        for name, operation in declared_by(type(handlers)):
            self.handle(operation, getattr(handlers, name))

    def replace(self, declared: Callable[..., Any], handler: Handler) -> None:
        """Have another handler answer what a method of some class declares."""
        for operation in operations_of(declared):
            self.handle(operation, handler)

    def lacks(self, operation: Operation) -> bool:
        """Returns whether no handler answers an operation."""
        return operation not in self._handlers

    def definitions(self) -> list[web.RouteDef]:
        """Returns the routes for an application."""
        refused = {
            _below(path): operation.off
            for operation in self._refused
            for path in operation.paths
            if operation.off is not None and self.lacks(operation)
        }
        return [
            *(
                web.RouteDef(method, path, handler, {"allow_head": False} if method == hdrs.METH_GET else {})
                for operation, handler in self._handlers.items()
                for path in operation.paths
                for method in operation.methods
            ),
            *(web.route("*", path, handler) for path, handler in refused.items()),
        ]

    def _name(self, operation: Operation, methods: tuple[str, ...], *paths: str) -> None:
        self.named |= {(method, canonical(path)): operation for path in paths for method in methods}


ROUTES: web.AppKey[Routes] = web.AppKey("routes", Routes)


def _below(path: str) -> str:
    """Returns a path, or the pattern of all paths below its beginning if it has parts that vary."""
    beginning, varies, _ = path.partition("/{")
    return f"{beginning}/{{path:.+}}" if varies else path
