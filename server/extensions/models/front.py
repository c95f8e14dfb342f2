"""The server of several models: what it listens with, and its life from the first load to the last drain.

Owns: the application, the order of shutting down.  Does not know: what handlers do, how a model is loaded.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from server.access import check_access
from server.clients import Rates
from server.extensions.models.configuration import SeveralModels
from server.extensions.models.model import ModelReplica
from server.extensions.models.models import Models
from server.extensions.models.routes import ModelsRoutes, counts
from server.extensions.models.settings import ModelsSettings
from server.http.connection import HttpRunner
from server.http.exchange import Traffic, note_route
from server.http.listener import bind, url_of
from server.http.operation import Handler, Operation
from server.http.replies import json_reply
from server.http.routes import ROUTES, Routes
from server.keys import Keys, read_keys
from server.openai.models import ModelRoutes
from server.operators.administration import AdministrationRoutes
from server.operators.metrics import MetricsRoute
from server.operators.settings import SettingsRoutes, refuse_settings
from server.operators.site import Site
from server.operators.status import ServerLoad, StatusRoutes
from server.proxy.administration import FleetAdministration
from server.proxy.affinity import PrefixAffinity
from server.proxy.observation import Observation
from server.proxy.proxy import Proxy, new_session
from server.run.app import own_version
from server.run.core import all_parts
from server.run.extension import declared, error_formats
from server.run.openapi import OpenApiRoute
from server.run.serve import listen_for_signals

log = logging.getLogger(__name__)


def serve_several(config: SeveralModels) -> None:
    """Serve until stopped.  Raises ConfigError."""
    with bind(config.server.host, config.server.port) as listener:
        where = url_of(listener, config.server.scheme)
        print(f"{len(config.models)} models at {where}; GET /v1/models says which are loaded", flush=True)
        uvloop.run(_serve(config, listener))


async def _serve(config: SeveralModels, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT: open requests go on for up to ``drain_timeout_s``, then the models end.

    Raises ConfigError for a model that cannot be one of several."""
    stop_requested = listen_for_signals(partial(log.info, "SIGHUP: several models go on as they were started"))
    async with fronting(config, listener) as (routes, models):
        starting = asyncio.create_task(start(routes, models))
        await stop_requested.wait()
        starting.cancel()
        log.info("draining: %d requests are open, up to %g s", models.num_open, config.server.drain_timeout_s)
        routes.is_leaving = True
        if not await models.drain(config.server.drain_timeout_s):
            log.warning("draining: %d requests end unfinished", models.num_open)


async def start(routes: ModelsRoutes, models: Models) -> None:
    """Load the models of the start."""
    await models.start()
    routes.started = True
    loaded = [one.name for one in models.all if one.is_ready]
    log.info("loaded of %d models: %s", len(models.all), ", ".join(loaded) or "none, they are on demand")


@asynccontextmanager
async def fronting(config: SeveralModels, listener: socket.socket) -> AsyncIterator[tuple[ModelsRoutes, Models]]:
    """Let the server listen for as long as the context lasts; at its end the models end."""
    for one in config.models:
        if one.config.placement.ingress == "process":
            raise ConfigError(
                f"[[models]] {one.table.name}: placement.ingress = 'process': it has its HTTP with it here"
            )
    server = config.server
    read_keys(server)  # a file that cannot be used is said before a model is loaded
    async with new_session() as session, AsyncExitStack() as stack:
        models = Models([ModelReplica(one) for one in config.models], ModelsSettings.of(config).models_memory_mb << 20)
        rates, affinity = Rates(config.limits), PrefixAffinity()
        # As long as its requests may wait for a model, a stream does whose model is loaded again.
        patience_s = config.limits.first_token_timeout_s or config.limits.request_timeout_s
        proxies = {one.name: Proxy(server, one, session, affinity, rates, patience_s) for one in models.all}
        routes = ModelsRoutes(server, config.limits, models, proxies, rates, patience_s)
        runner = HttpRunner(_application(server, routes, models, session), server, Traffic())
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(models.stop)
        await runner.listen(listener)
        yield routes, models


def _application(
    server: ServerSection, routes: ModelsRoutes, models: Models, session: aiohttp.ClientSession
) -> web.Application:
    keys, version = Keys(server), own_version()
    observation = Observation(models, session, lambda: counts(models))
    administration = FleetAdministration(server, models, session)

    async def answer_version(request: web.Request) -> web.Response:
        return json_reply({"version": version})

    async def load(request: web.Request) -> web.StreamResponse:
        """Answer for all models together, unless one is named."""
        if "model" in request.query:
            return await routes.look(request)
        if any(one.is_ready for one in models.all):
            return await observation.stats(request)
        return json_reply(ServerLoad(models.num_open, 0, models.num_open))

    own: tuple[tuple[Callable[..., Any], Handler], ...] = (
        (StatusRoutes.health, routes.health),
        (StatusRoutes.ready, routes.ready),
        (StatusRoutes.version, answer_version),
        (StatusRoutes.load, load),
        (ModelRoutes.all, routes.list),
        (ModelRoutes.one, routes.one),
        (MetricsRoute.get, observation.metrics),
        (AdministrationRoutes.abort, administration.abort),
        (AdministrationRoutes.reset, administration.reset),
        (SettingsRoutes.is_sleeping, refuse_settings),
    )
    table, parts = Routes(), all_parts()
    for operation in declared(parts):
        if operation.off is not None:
            table.refuse(operation)
        elif operation.gathered:
            table.handle(operation, administration.gather)
        else:
            table.handle(operation, _handler_of(operation, routes))
    for declared_handler, handler in own:
        table.replace(declared_handler, handler)
    table.add(Site())
    table.add(OpenApiRoute(version, declared(parts)))
    app = web.Application(middlewares=[note_route(table, error_formats(parts)), check_access(keys)])
    app.add_routes(table.definitions())
    app[ROUTES] = table
    return app


def _handler_of(operation: Operation, routes: ModelsRoutes) -> Handler:
    """Returns what answers an operation that the front has no answer of its own to."""
    if operation.generates:
        return routes.generate
    return routes.look if operation.methods[0] == "GET" else routes.post
