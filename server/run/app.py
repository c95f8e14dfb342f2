"""Puts a server together: a loop over its parts, the core first and then every extension that is there.

Owns: the order of middlewares, what is answered where a part is off.  Does not know: any part, or any route.
"""

from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.actors.operations import SettingsChanged
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from server.access import check_access
from server.backend import Backend
from server.clients import CacheSalts, Clients
from server.generate.endpoint import Endpoint
from server.generate.route import GenerateRoute
from server.http.connection import HttpRunner
from server.http.exchange import Traffic, note_route
from server.http.operation import Handler
from server.http.routes import ROUTES, Routes
from server.keys import Keys
from server.model_card import ModelCard
from server.openai.translator import Translator
from server.run.core import all_parts
from server.run.extension import ServerParts, declared, error_formats
from server.run.kept import Kept

DISTRIBUTION = "callboard"
NO_STORAGE = StorageSection()


def create_runner(
    server: ServerSection,
    limits: LimitsSection,
    backend: Backend,
    salts: CacheSalts | None = None,
    kept: Kept | None = None,
    *,
    storage: StorageSection = NO_STORAGE,
    guard: Middleware | None = None,
) -> HttpRunner:
    """Returns aiohttp's runner for the whole API, to be set up on the event loop that ingress runs on.

    guard: the middleware that every request must pass first.
    salts: None for new ones.  kept: what a process before this one has kept.  Raises ConfigError for a folder of
    ``storage`` that cannot be used."""
    version, card, all_of_it = own_version(), backend.card, all_parts()
    translator = Translator(card, backend.codec.formats.tools, f"{DISTRIBUTION}-{version}")
    clients = Clients(backend.ingress, server, limits, salts)
    _follow_settings(backend, clients, translator)
    keys, routes = Keys(server), Routes()
    app = web.Application(
        middlewares=[
            note_route(routes, error_formats(all_of_it)),
            *([] if guard is None else [guard]),
            check_access(keys),
            clients.middleware,
        ]
    )
    parts = ServerParts(
        server=server,
        limits=limits,
        storage=storage,
        version=version,
        backend=backend,
        clients=clients,
        keys=keys,
        translator=translator,
        kept=kept or Kept(),
        traffic=Traffic(),
        app=app,
        routes=routes,
        operations=declared(all_of_it),
        served=_add_endpoints(
            routes, [kind(translator) for part in all_of_it for kind in part.endpoints], server, card
        ),
    )
    for part in all_of_it:
        part.join(parts)
    for operation in parts.operations:
        if routes.lacks(operation):
            routes.refuse(operation)
    app.add_routes(routes.definitions())
    app[ROUTES] = routes
    return HttpRunner(app, server, parts.traffic)


def _follow_settings(backend: Backend, clients: Clients, translator: Translator) -> None:
    """Have limits and the model's card change with the engine's settings."""

    def settings_changed(changed: SettingsChanged) -> None:
        clients.limit(changed.limits)
        if changed.about:
            translator.card = msgspec.msgpack.decode(changed.about, type=ModelCard)

    backend.ingress.settings_watchers.append(settings_changed)


def _add_endpoints(
    routes: Routes, endpoints: list[Endpoint[Any]], server: ServerSection, card: ModelCard
) -> dict[str, GenerateRoute[Any]]:
    """Add the endpoints; returns those that the model is for: path -> what answers it.

    Endpoints of different models may share an operation; the one that this model is for answers it."""
    served: dict[str, GenerateRoute[Any]] = {}
    for endpoint in endpoints:
        if endpoint.task in card.use.tasks:
            route = GenerateRoute(endpoint, server)
            served |= dict.fromkeys(endpoint.operation.paths, route)
            routes.handle(endpoint.operation, route.post)
        elif routes.lacks(endpoint.operation):
            routes.handle(endpoint.operation, refused(endpoint, card))
    return served


def refused(endpoint: Endpoint[Any], card: ModelCard) -> Handler:
    """Returns the handler of an endpoint that the model is not for.  It raises RequestError: 400."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        card.use.check(endpoint.task, endpoint.refusal)
        raise AssertionError(f"{card.name} serves {endpoint.task}")

    return refuse


def own_version() -> str:
    """Returns what is installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
