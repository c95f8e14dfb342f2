"""Puts the server together: the only file here that names every handler.

Owns: the routes.  Does not know: what they do; sockets, signals.
"""

from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.actors.operations import SettingsChanged
from engine.pooling import check_task
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from engine.text.codec import TextCodec
from server.access import access, check_access
from server.adapters import Adapters
from server.anthropic.endpoint import CountRoute, Messages
from server.anthropic.objects import COUNT, ERROR_FORMATS
from server.backend import Backend
from server.clients import CacheSalts, Clients
from server.generate.endpoint import Endpoint
from server.generate.route import GenerateRoute
from server.http.connection import HttpRunner
from server.http.exchange import Handler, Traffic, note_route
from server.journal.streams import STREAM, no_streams, open_streams
from server.keys import Keys
from server.model_card import ModelCard
from server.native.endpoint import Native
from server.openai.chat import Chat
from server.openai.completions import Completions
from server.openai.models import ModelRoutes
from server.openai.tokenization import TokenizationRoutes
from server.openai.translator import Translator
from server.operators.adapters import LOAD, UNLOAD, AdapterRoutes
from server.operators.administration import AdministrationRoutes, administration_routes
from server.operators.explain import EXPLAIN, ExplainRoute
from server.operators.metrics import MetricsRoute
from server.operators.profiling import ProfileRoutes
from server.operators.recording import PATH as RECORDING
from server.operators.recording import RecordingRoute
from server.operators.settings import SettingsRoutes
from server.operators.site import FILES, Site
from server.operators.stats import StatsRoute
from server.operators.status import ProbeRoute, StatusRoutes
from server.operators.traces import Traces, open_provider
from server.pooling.classify import Classify
from server.pooling.embeddings import Embeddings
from server.pooling.pairs import Rerank, ScorePairs
from server.pooling.raw import RawPooling
from server.pooling.requests import PooledTranslator
from server.responses.endpoint import Responses, refuse_stored
from server.run.openapi import openapi_handler
from server.run.storage import Unattended, add_storage
from server.storage.routes import known_routes, refuse_storage
from server.storage.store import Store

STORED = "/v1/responses/{path:.+}"
DISTRIBUTION = "callboard"
NO_STORAGE = StorageSection()


def create_runner(
    server: ServerSection,
    limits: LimitsSection,
    backend: Backend,
    salts: CacheSalts | None = None,
    adapters: Adapters | None = None,
    *,
    storage: StorageSection = NO_STORAGE,
    guard: Middleware | None = None,
) -> HttpRunner:
    """Returns aiohttp's runner for the whole API, to be set up on the event loop that ingress runs on.

    guard: what every request must pass first.
    salts: None for new ones.  adapters: None for those of the model's card.  Raises ConfigError for a folder of
    ``storage`` that cannot be used."""
    version = own_version()
    card = backend.card
    adapters = adapters or Adapters(card.adapter_rules, card.adapters, card.name)
    translator = Translator(card, backend.codec.formats.tools, adapters.served, f"{DISTRIBUTION}-{version}")
    clients = Clients(backend.ingress, server, limits, salts)

    def settings_changed(changed: SettingsChanged) -> None:
        clients.limit(changed.limits)
        if changed.about:
            translator.card = msgspec.msgpack.decode(changed.about, type=ModelCard)

    backend.ingress.settings_watchers.append(settings_changed)
    traces = Traces(open_provider(server.traces, version), backend.card.name) if server.traces else None
    traffic = Traffic()
    keys = Keys(server)
    middlewares = [
        note_route(ERROR_FORMATS),
        *([] if guard is None else [guard]),
        check_access(keys),
        clients.middleware,
    ]
    if traces is not None:
        middlewares.append(traces.middleware)
    app = web.Application(middlewares=middlewares)
    endpoints: dict[str, Endpoint[Any]] = {
        "/v1/completions": Completions(translator),
        "/v1/chat/completions": Chat(translator),
        "/v1/responses": Responses(translator),
        "/v1/messages": Messages(translator),
        "/generate": Native(translator),
        **_pooled_endpoints(PooledTranslator(translator)),
    }
    streams = open_streams(storage, clients, keys if server.needs_key else None, lambda: translator.card.fingerprint)
    served: dict[str, GenerateRoute[Any]] = {}
    for path, endpoint in endpoints.items():
        if endpoint.task in backend.card.pooling.tasks:
            served[path] = GenerateRoute(endpoint, server, streams)
        else:
            app.router.add_post(path, refused(endpoint, backend.card))
    if streams is not None:
        streams.routes |= served
        app.cleanup_ctx.append(streams.live)
    app.router.add_get(STREAM, no_streams if streams is None else streams.rejoin)
    if storage.folder:
        stored = add_storage(app, Store(storage), served, Unattended(server, backend, clients, keys))
    else:
        stored = frozenset()
        app.add_routes([*known_routes(refuse_storage), web.route("*", STORED, refuse_stored)])
    app.add_routes(web.post(path, route.post) for path, route in served.items() if path not in stored)
    app.add_routes(_api_routes(server, translator, backend.codec))
    more = () if streams is None else (streams.gauges,)
    metrics = MetricsRoute(backend, traffic, version=version, adapters=adapters.served, more=more)
    app.router.add_get("/metrics", metrics.get)
    app.add_routes(_operators_routes(server, backend, clients, version))
    loading = AdapterRoutes(adapters, server)
    app.add_routes([web.post(LOAD, loading.load), web.post(UNLOAD, loading.unload)])
    if traces is not None:
        backend.monitor.watch(traces, "server.traces")
        app.on_cleanup.append(traces.close)
    return HttpRunner(app, server, traffic)


def _pooled_endpoints(translator: PooledTranslator) -> dict[str, Endpoint[Any]]:
    """Those whose answers are no text, under every name that clients know."""
    classify, score, rerank = Classify(translator), ScorePairs(translator), Rerank(translator)
    return {
        "/v1/embeddings": Embeddings(translator),
        **dict.fromkeys(("/classify", "/v1/classify"), classify),
        **dict.fromkeys(("/score", "/v1/score"), score),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        "/pooling": RawPooling(translator),
    }


def refused(endpoint: Endpoint[Any], card: ModelCard) -> Handler:
    """Returns the handler of an endpoint that the model is not for.  It raises RequestError: 400."""

    @access("client")
    async def refuse(request: web.Request) -> web.StreamResponse:
        check_task(card.pooling, endpoint.task)
        raise AssertionError(f"{card.name} serves {endpoint.task}")

    return refuse


def _api_routes(server: ServerSection, translator: Translator, codec: TextCodec) -> list[web.RouteDef]:
    models, tokenization = ModelRoutes(translator), TokenizationRoutes(codec, translator, server)
    return [
        web.get("/v1/models", models.all),
        web.get("/v1/models/{id:.+}", models.one),
        *(web.post(prefix + "/tokenize", tokenization.tokenize) for prefix in ("", "/v1")),
        *(web.post(prefix + "/detokenize", tokenization.detokenize) for prefix in ("", "/v1")),
        web.get("/tokenizer_info", tokenization.info),
        web.post(COUNT, CountRoute(codec, translator, server).post),
    ]


def _operators_routes(server: ServerSection, backend: Backend, clients: Clients, version: str) -> list[web.RouteDef]:
    site, status = Site(), StatusRoutes(backend, clients, version)
    stats = StatsRoute(backend, clients, version=version, shows_text=not server.needs_key)
    administration, profiling = AdministrationRoutes(clients, server), ProfileRoutes(backend.monitor, server)
    return [
        web.get("/", site.index),
        web.get(FILES, site.file),
        web.get("/health", status.health),
        *(web.route(method, "/ping", status.health) for method in ("GET", "POST")),
        web.get("/ready", status.ready),
        web.get("/version", status.version),
        *(web.get(path, status.info) for path in ("/server_info", "/get_server_info")),
        *(web.get(path, status.model) for path in ("/model_info", "/get_model_info")),
        web.get("/load", status.load),
        web.get("/health_generate", ProbeRoute(clients, backend.card.pooling).get),
        web.get("/stats", stats.get),
        web.get(EXPLAIN, ExplainRoute(backend, clients).get),
        *administration_routes(administration.abort, administration.reset),
        *SettingsRoutes(backend, server).routes(),
        web.post("/start_profile", profiling.start),
        web.post("/stop_profile", profiling.stop),
        web.post(RECORDING, RecordingRoute(backend.operations, backend.card.recordings).post),
        web.get("/openapi.json", openapi_handler(version)),
    ]


def own_version() -> str:
    """Returns what is installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
