"""The server of several models: what it listens with, and its life from the first load to the last drain.

Owns: the application, the order of shutting down.  Does not know: what handlers do, how a model is loaded.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
import uvloop
from aiohttp import web

from engine.config import SeveralModels
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from server.access import access, check_access
from server.anthropic.objects import COUNT, ERROR_FORMATS
from server.clients import Rates
from server.http.connection import HttpRunner
from server.http.exchange import Traffic, note_route
from server.http.listener import bind, url_of
from server.http.replies import json_reply
from server.journal.streams import STREAM, no_streams
from server.keys import Keys, read_keys
from server.models.model import Model
from server.models.models import Models
from server.models.routes import ModelsRoutes, counts
from server.operators.administration import administration_routes
from server.operators.explain import EXPLAIN
from server.operators.recording import PATH as RECORDING
from server.operators.settings import IS_SLEEPING, PATHS, refuse_settings
from server.operators.site import FILES, Site
from server.operators.status import Load
from server.replicas.administration import FleetAdministration
from server.replicas.affinity import PrefixAffinity
from server.replicas.observation import Observation
from server.replicas.proxy import Proxy, new_session
from server.replicas.router import GENERATING
from server.responses.endpoint import refuse_stored
from server.run.app import STORED, own_version
from server.run.openapi import openapi_handler
from server.run.serve import listen_for_signals
from server.storage.routes import known_routes, refuse_storage

log = logging.getLogger(__name__)

POSTED = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", COUNT)
POSTED_BY_OPERATORS = ("/start_profile", "/stop_profile", RECORDING)
LOOKED_AT = ("/tokenizer_info", "/model_info", "/get_model_info")
LOOKED_AT_BY_OPERATORS = ("/stats", "/server_info", "/get_server_info", "/health_generate")


def serve_several(config: SeveralModels) -> None:
    """Serve until stopped.  Raises ConfigError."""
    with bind(config.server.host, config.server.port) as listener:
        where = url_of(listener, config.server.scheme)
        print(f"{len(config.models)} models at {where}; GET /v1/models says which are loaded", flush=True)
        uvloop.run(_serve(config, listener))


async def _serve(config: SeveralModels, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT: open requests go on for up to ``drain_timeout_s``, then the models end.

    Raises ConfigError for a model that cannot be one of several."""
    told_to_stop = listen_for_signals(partial(log.info, "SIGHUP: several models go on as they were started"))
    async with fronting(config, listener) as (routes, models):
        starting = asyncio.create_task(start(routes, models))
        await told_to_stop.wait()
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
    if config.lora.folder:
        raise ConfigError(f"lora.folder={config.lora.folder}: adapters are of one model, and this file has [[models]]")
    server = config.server
    read_keys(server)  # a file that cannot be used is said before a model is loaded
    async with new_session() as session, AsyncExitStack() as stack:
        models = Models([Model(one) for one in config.models], server.models_memory_mb << 20)
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
    keys, site, version = Keys(server), Site(), own_version()
    observation = Observation(models, session, lambda: counts(models))
    administration = FleetAdministration(server, models, session)

    @access("client")
    async def tell_version(request: web.Request) -> web.Response:
        return json_reply({"version": version})

    @access("operator")
    async def load(request: web.Request) -> web.StreamResponse:
        """Of all models together, unless one is named."""
        if "model" in request.query:
            return await routes.inspect(request)
        if any(one.is_ready for one in models.all):
            return await observation.stats(request)
        return json_reply(Load(models.num_open, 0, models.num_open))

    app = web.Application(middlewares=[note_route(ERROR_FORMATS), check_access(keys)])
    app.add_routes(
        [
            web.get("/", site.index),
            web.get(FILES, site.file),
            web.get("/health", routes.health),
            *(web.route(method, "/ping", routes.health) for method in ("GET", "POST")),
            web.get("/ready", routes.ready),
            web.get("/version", tell_version),
            web.get("/openapi.json", openapi_handler(version)),
            web.get("/v1/models", routes.list),
            web.get("/v1/models/{id:.+}", routes.one),
            web.get("/metrics", observation.metrics),
            web.get("/load", load),
            *administration_routes(administration.abort, administration.reset),
            web.get(EXPLAIN, administration.explain),
            *(web.post(path, routes.generate) for path in GENERATING),
            *(web.post(path, routes.post) for path in POSTED),
            *(web.post(path, routes.operate) for path in POSTED_BY_OPERATORS),
            *(web.get(path, routes.look) for path in LOOKED_AT),
            *(web.get(path, routes.inspect) for path in LOOKED_AT_BY_OPERATORS),
            web.route("*", STORED, refuse_stored),
            *known_routes(refuse_storage),
            web.get(STREAM, no_streams),
            *(web.post(path, refuse_settings) for path in PATHS),
            web.get(IS_SLEEPING, refuse_settings),
        ]
    )
    return app
