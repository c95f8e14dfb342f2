"""Puts the server together: the only file here that names every handler.

Owns: the routes.  Does not know: what they do; sockets, signals.
"""

from importlib import metadata

from aiohttp import web

from engine.config import LimitsSection, ServerSection
from engine.text.codec import TextCodec
from server.auth import OPEN_ROUTES, require_key
from server.backend import Ingress, Monitor
from server.chat import Chat
from server.clients import Clients
from server.completions import Completions
from server.connection import Runner
from server.embeddings import EmbeddingRoute
from server.exchange import note_route
from server.generate import GenerateRoute
from server.generation import Translator
from server.metrics import MetricsRoute
from server.model_card import ModelCard
from server.models import ModelRoutes
from server.openai_requests import ChatBody, CompletionBody
from server.openapi import OpenAPIRoute
from server.responses.route import ResponsesRoute
from server.site import FILES, SITE_ROUTES, Site
from server.stats import StatsRoute
from server.status import StatusRoutes
from server.tokenization import TokenizationRoutes
from server.traces import Traces, open_provider
from server.traffic import Traffic

DISTRIBUTION = "callboard"


def create_runner(
    server: ServerSection,
    limits: LimitsSection,
    ingress: Ingress,
    card: ModelCard,
    monitor: Monitor,
    codec: TextCodec | None = None,
) -> Runner:
    """aiohttp's runner for the whole API.  To be set up on the event loop that ``ingress`` runs on.
    codec: what /tokenize asks; None for a model that takes token ids only."""
    version = _version()
    fingerprint = f"{DISTRIBUTION}-{version}"
    translator = Translator(card, limits)
    clients = Clients(server, limits)
    traces = Traces(open_provider(server.traces, version), card.name) if server.traces else None
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
    embeddings = EmbeddingRoute(translator, server=server, limits=limits, ingress=guarded, card=card)
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
            web.get("/metrics", metrics.get),
            web.get("/stats", stats.get),
            web.get("/v1/models", models.all),
            web.get("/v1/models/{id:.+}", models.one),
            web.post("/v1/completions", completions.post),
            web.post("/v1/chat/completions", chat.post),
            web.post("/v1/responses", responses.post),
            web.post("/v1/embeddings", embeddings.post),
            *(web.post(prefix + "/tokenize", tokenization.tokenize) for prefix in ("", "/v1")),
            *(web.post(prefix + "/detokenize", tokenization.detokenize) for prefix in ("", "/v1")),
            web.get("/openapi.json", openapi.get),
        ]
    )
    if traces is not None:
        monitor.watch(traces, "server.traces")
        app.on_cleanup.append(traces.close)
    return Runner(app, server, traffic)


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
