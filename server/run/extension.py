"""The seam for optional parts of the server: a folder of server/extensions that is found by looking for it.

Owns: what a part may bring, what it is given, in which order parts join.  Does not know: any part.
A folder may have a module ``extension`` with one object, EXTENSION, and a module ``arguments`` for the command line,
which imports nothing of the engine: its ``add_commands(commands)`` adds subcommands, its ``add_serve_arguments(serve)``
arguments of ``callboard serve``.  Its package may name in NEEDS the folders that it imports.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from aiohttp import web

from engine.checkpoints.use import Kind
from engine.config import Config
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from server.backend import Backend
from server.clients import Clients
from server.generate.endpoint import Endpoint
from server.generate.route import GenerateRoute
from server.http.exchange import ErrorFormats, Traffic
from server.http.operation import Operation, declared_by
from server.http.routes import Routes
from server.keys import Keys
from server.openai.translator import Translator
from server.operators.metrics import Collect, More
from server.run.finding import Finding
from server.run.folders import modules_named
from server.run.kept import Kept

if TYPE_CHECKING:
    from engine.control.system import System

FirstRequest = tuple[str, dict[str, Any]]


class Serving(NamedTuple):
    """Another way to serve than one engine in this process.  run: serves until stopped.

    engines: what there are several of.  configs: of each kind of engine, and the whole where they differ."""

    run: Callable[[], None]
    engines: str
    configs: tuple[Config, ...]


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """One server while it is put together.  operations: all that are declared.

    served: path -> what answers it, of those that generate.  gauges, collectors: give samples for /metrics.
    kept: what outlives the process of HTTP."""

    server: ServerSection
    limits: LimitsSection
    storage: StorageSection
    version: str
    backend: Backend
    clients: Clients
    keys: Keys
    translator: Translator
    kept: Kept
    traffic: Traffic
    app: web.Application
    routes: Routes
    operations: tuple[Operation, ...]
    served: Mapping[str, GenerateRoute[Any]]
    gauges: list[More] = field(default_factory=list)
    collectors: list[Collect] = field(default_factory=list)


class Extension:
    """A part of the server.  What a subclass leaves as it is here, the part does not bring.

    endpoints: its endpoints that generate, each built with the translator.
    handlers: classes whose methods declare the rest of its operations.
    error_formats: see ``note_route``.
    first_requests: a path and fields to try, for a kind of model."""

    endpoints: ClassVar[tuple[type[Endpoint[Any]], ...]] = ()
    handlers: ClassVar[tuple[type, ...]] = ()
    error_formats: ClassVar[ErrorFormats] = MappingProxyType({})
    first_requests: ClassVar[Mapping[Kind, FirstRequest]] = MappingProxyType({})

    def operations(self) -> Iterator[Operation]:
        """Give all operations that the part declares, served or not."""
        yield from (endpoint.operation for endpoint in self.endpoints)
        yield from (one for kind in self.handlers for _, one in declared_by(kind))

    def check(self, config: Config, engines: str = "") -> None:
        """Raise ConfigError for a configuration that the part cannot be served with.

        engines: what there are several of; '' for one engine."""

    def describe(self, system: "System") -> dict[str, bytes]:
        """Return what the part must know of an engine, for the model's card: it may be used in another process."""
        return {}

    def findings(self, config: Config) -> Iterator[Finding]:
        """Return what ``callboard doctor`` finds of the part: whether a start with this configuration can serve it."""
        yield from ()

    def join(self, parts: ServerParts) -> None:
        """Become part of a server: add handlers, and what lives while it does.  Raises ConfigError."""

    def with_engine(self, system: "System") -> None:
        """Called in the process of an engine, on its event loop, before the engine starts."""

    def configuration(self, path: Path | None, overrides: Sequence[str]) -> Config | None:
        """Return the configuration of a file with an array of the part's own; None for another.  Raises ConfigError."""
        return None

    def serving(self, parsed: argparse.Namespace, config: Config) -> Serving | None:
        """Returns how to serve, where the arguments or the configuration ask for this part.  Raises ConfigError."""
        return None


@cache
def find_extensions() -> tuple[Extension, ...]:
    """Returns the parts in server/extensions, each behind those that it needs."""
    return tuple(module.EXTENSION for module in modules_named("extension"))


def declared(parts: Iterable[Extension]) -> tuple[Operation, ...]:
    """Returns the operations of parts.  Endpoints for different models may share one."""
    return tuple(dict.fromkeys(operation for part in parts for operation in part.operations()))


def described(system: "System") -> dict[str, bytes]:
    """Return what the extensions must know of an engine, for the model's card."""
    return {name: about for one in find_extensions() for name, about in one.describe(system).items()}


def error_formats(parts: Iterable[Extension]) -> ErrorFormats:
    """Returns the error formats of parts: beginning of paths -> format."""
    return {beginning: form for part in parts for beginning, form in part.error_formats.items()}
