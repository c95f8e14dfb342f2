"""Puts the server together: the only file here that names every handler.

Owns: the routes.  Does not know: what they do; sockets, signals.
"""

from importlib import metadata

from aiohttp import web

from engine.sections import LimitsSection, ServerSection
from engine.text.codec import TextCodec
from server.backend import Ingress, Monitor
from server.clients.auth import OPEN_ROUTES, require_key
from server.clients.open_requests import Clients
from server.clients.salts import Salts
from server.generate.route import GenerateRoute
from server.http.connection import Runner
from server.http.exchange import note_route
from server.http.traffic import Traffic
from server.model_card import ModelCard
from server.native.route import NativeRoute
from server.openai.chat import Chat
from server.openai.completions import Completions
from server.openai.embeddings import EmbeddingRoute
from server.openai.models import ModelRoutes
from server.openai.requests import ChatBody, CompletionBody
from server.openai.tokenization import TokenizationRoutes
from server.openai.translator import Translator
from server.operators.administration import ABORT_PATHS, RESET_PATHS, AdministrationRoutes
from server.operators.metrics import MetricsRoute
from server.operators.probe import ProbeRoute
from server.operators.server_info import InfoRoutes
from server.operators.site import FILES, SITE_ROUTES, Site
from server.operators.stats import StatsRoute
from server.operators.status import StatusRoutes
from server.operators.traces import Traces, open_provider
from server.responses.route import ResponsesRoute
from server.run.openapi import OpenAPIRoute

STORED = "/v1/responses/{id}"
DISTRIBUTION = "callboard"


def create_runner(
    server: ServerSection,
    limits: LimitsSection,
    ingress: Ingress,
    card: ModelCard,
    monitor: Monitor,
    codec: TextCodec | None = None,
    salts: Salts | None = None,
) -> Runner:
    """aiohttp's runner for the whole API.  To be set up on the event loop that ``ingress`` runs on.
    codec: what /tokenize asks; None for a model that takes token ids only.  salts: None for new ones."""
    version = _version()
    fingerprint = f"{DISTRIBUTION}-{version}"
    translator = Translator(card)
    clients = Clients(server, limits, salts)
    traces = Traces(open_provider(server.operators.traces, version), card.name) if server.operators.traces else None
    guarded = clients.guard(ingress if traces is None else traces.guard(ingress))
    traffic = Traffic()
    status = StatusRoutes(ingress, monitor, version)
    metrics = MetricsRoute(
        monitor, ingress, traffic, version=version, model=card.name, aliases=server.vllm_metric_names
    )
    stats = StatsRoute(monitor, ingress, version=version, model=card.name, shows_text=not server.api_key)
    site = Site()
    models = ModelRoutes(card, translator)
    tokenization = TokenizationRoutes(codec or TextCodec.without_tokenizer(), card, translator, server)
    responses = ResponsesRoute(translator, server=server, limits=limits, ingress=guarded, card=card)
    native = NativeRoute(translator, server=server, limits=limits, ingress=guarded, card=card)
    embeddings = EmbeddingRoute(translator, server=server, limits=limits, ingress=guarded, card=card)
    info = InfoRoutes(ingress, monitor, card, limits, version)
    probe = ProbeRoute(guarded, limits)
    administration = AdministrationRoutes(ingress, clients, server)
    openapi = OpenAPIRoute(version)
    completions = GenerateRoute(
        Completions(translator),
        CompletionBody,
        server=server,
        limits=limits,
        ingress=guarded,
        card=card,
        system_fingerprint=fingerprint,
    )
    chat = GenerateRoute(
        Chat(translator, card),
        ChatBody,
        server=server,
        limits=limits,
        ingress=guarded,
        card=card,
        system_fingerprint=fingerprint,
    )
    middlewares = [
        note_route,
        *([require_key(server.api_key, OPEN_ROUTES | SITE_ROUTES)] if server.api_key else []),
        clients.middleware,
    ]
    if traces is not None:
        middlewares.append(traces.middleware)
    app = web.Application(middlewares=middlewares)
    app.add_routes(
        [
            web.get("/health", status.health),
            web.get("/ready", status.ready),
            web.get("/", site.index),
            web.get(FILES, site.file),
            web.get("/version", status.version),
            web.get("/server_info", info.info),
            web.get("/load", info.load),
            web.get("/health_generate", probe.get),
            web.get("/metrics", metrics.get),
            web.get("/stats", stats.get),
            web.get("/v1/models", models.all),
            web.get("/v1/models/{id:.+}", models.one),
            web.post("/v1/completions", completions.post),
            web.post("/v1/chat/completions", chat.post),
            web.post("/v1/responses", responses.post),
            *(web.route(method, STORED, responses.stored) for method in ("GET", "DELETE")),
            web.post(f"{STORED}/cancel", responses.stored),
            web.get(f"{STORED}/input_items", responses.stored),
            web.post("/v1/embeddings", embeddings.post),
            web.post("/generate", native.post),
            *(web.post(prefix + "/tokenize", tokenization.tokenize) for prefix in ("", "/v1")),
            *(web.post(prefix + "/detokenize", tokenization.detokenize) for prefix in ("", "/v1")),
            *(web.post(path, administration.abort) for path in ABORT_PATHS),
            *(web.post(path, administration.reset) for path in RESET_PATHS),
            *(web.get(path, administration.reset, allow_head=False) for path in RESET_PATHS),
            web.get("/openapi.json", openapi.get),
        ]
    )
    if traces is not None:
        monitor.watch(traces, "server.operators.traces")
        app.on_cleanup.append(traces.close)
    return Runner(app, server, traffic)


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
