"""Puts the server together: the only file here that names every handler.

Owns: the routes.  Does not know: what they do; sockets, signals.
"""

from importlib import metadata
from typing import Any

from aiohttp import web

from engine.sections import LimitsSection, ServerSection
from engine.text.codec import TextCodec
from server.backend import Backend
from server.clients import OPEN_ROUTES, CacheSalts, Clients, require_key
from server.generate.endpoint import Endpoint
from server.generate.route import GenerateRoute
from server.http.connection import HttpRunner
from server.http.exchange import Traffic, note_route
from server.native.endpoint import Native
from server.openai.chat import Chat
from server.openai.completions import Completions
from server.openai.embeddings import Embeddings
from server.openai.models import ModelRoutes
from server.openai.tokenization import TokenizationRoutes
from server.openai.translator import Translator
from server.operators.administration import AdministrationRoutes, administration_routes
from server.operators.metrics import MetricsRoute
from server.operators.site import FILES, SITE_ROUTES, Site
from server.operators.stats import StatsRoute
from server.operators.status import ProbeRoute, StatusRoutes
from server.operators.traces import Traces, open_provider
from server.responses.endpoint import Responses, refuse_stored
from server.run.openapi import openapi_handler

STORED = "/v1/responses/{id}"
DISTRIBUTION = "callboard"


def create_runner(
    server: ServerSection, limits: LimitsSection, backend: Backend, salts: CacheSalts | None = None
) -> HttpRunner:
    """Returns aiohttp's runner for the whole API, to be set up on the event loop that ingress runs on.

    salts: None for new ones."""
    version = _version()
    fingerprint = "-".join(filter(None, (DISTRIBUTION, version, backend.card.fingerprint)))
    translator = Translator(backend.card, backend.codec.formats.tools)
    clients = Clients(backend.ingress, server, limits, salts)
    traces = Traces(open_provider(server.traces, version), backend.card.name) if server.traces else None
    traffic = Traffic()
    middlewares = [
        note_route,
        *([require_key(server.api_key, OPEN_ROUTES | SITE_ROUTES)] if server.api_key else []),
        clients.middleware,
    ]
    if traces is not None:
        middlewares.append(traces.middleware)
    app = web.Application(middlewares=middlewares)
    endpoints: dict[str, Endpoint[Any]] = {
        "/v1/completions": Completions(translator, fingerprint),
        "/v1/chat/completions": Chat(translator, fingerprint),
        "/v1/responses": Responses(translator),
        "/v1/embeddings": Embeddings(translator),
        "/generate": Native(translator),
    }
    for path, endpoint in endpoints.items():
        app.router.add_post(path, GenerateRoute(endpoint, server).post)
    app.add_routes(_api_routes(server, translator, backend.codec))
    metrics = MetricsRoute(backend, traffic, version=version, aliases=server.vllm_metric_names)
    app.router.add_get("/metrics", metrics.get)
    app.add_routes(_operators_routes(server, limits, backend, clients, version))
    if traces is not None:
        backend.monitor.watch(traces, "server.traces")
        app.on_cleanup.append(traces.close)
    return HttpRunner(app, server, traffic)


def _api_routes(server: ServerSection, translator: Translator, codec: TextCodec) -> list[web.RouteDef]:
    models, tokenization = ModelRoutes(translator), TokenizationRoutes(codec, translator, server)
    return [
        web.get("/v1/models", models.all),
        web.get("/v1/models/{id:.+}", models.one),
        *(web.route(method, STORED, refuse_stored) for method in ("GET", "DELETE")),
        web.post(f"{STORED}/cancel", refuse_stored),
        web.get(f"{STORED}/input_items", refuse_stored),
        *(web.post(prefix + "/tokenize", tokenization.tokenize) for prefix in ("", "/v1")),
        *(web.post(prefix + "/detokenize", tokenization.detokenize) for prefix in ("", "/v1")),
    ]


def _operators_routes(
    server: ServerSection, limits: LimitsSection, backend: Backend, clients: Clients, version: str
) -> list[web.RouteDef]:
    site, status = Site(), StatusRoutes(backend, limits, version)
    stats = StatsRoute(backend, version=version, shows_text=not server.api_key)
    administration = AdministrationRoutes(clients, server)
    return [
        web.get("/", site.index),
        web.get(FILES, site.file),
        web.get("/health", status.health),
        web.get("/ready", status.ready),
        web.get("/version", status.version),
        web.get("/server_info", status.info),
        web.get("/load", status.load),
        web.get("/health_generate", ProbeRoute().get),
        web.get("/stats", stats.get),
        *administration_routes(administration.abort, administration.reset),
        web.get("/openapi.json", openapi_handler(version)),
    ]


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
