"""Puts the server together: the only file here that names every handler.

Owns: the routes.  Does not know: what they do; sockets, signals.
"""

from importlib import metadata

from aiohttp import web

from engine.config import LimitsSection, ServerSection
from server.auth import require_key
from server.backend import Ingress
from server.chat import Chat
from server.completions import Completions
from server.connection import Runner
from server.exchange import note_route
from server.generate import GenerateRoute
from server.generation import Translator
from server.model_card import ModelCard
from server.models import ModelRoutes
from server.openai_requests import ChatBody, CompletionBody
from server.status import StatusRoutes

DISTRIBUTION = "callboard"


def create_runner(server: ServerSection, limits: LimitsSection, ingress: Ingress, card: ModelCard) -> Runner:
    """aiohttp's runner for the whole API.  To be set up on the event loop that ``ingress`` runs on."""
    version = _version()
    fingerprint = f"{DISTRIBUTION}-{version}"
    translator = Translator(card, limits)
    status = StatusRoutes(ingress, version)
    models = ModelRoutes(card, translator)
    completions = GenerateRoute(
        Completions(translator),
        CompletionBody,
        server=server,
        limits=limits,
        ingress=ingress,
        card=card,
        system_fingerprint=fingerprint,
    )
    chat = GenerateRoute(
        Chat(translator),
        ChatBody,
        server=server,
        limits=limits,
        ingress=ingress,
        card=card,
        system_fingerprint=fingerprint,
    )
    app = web.Application(middlewares=[note_route, *([require_key(server.api_key)] if server.api_key else [])])
    app.add_routes(
        [
            web.get("/health", status.health),
            web.get("/ready", status.ready),
            web.get("/version", status.version),
            web.get("/v1/models", models.all),
            web.get("/v1/models/{id:.+}", models.one),
            web.post("/v1/completions", completions.post),
            web.post("/v1/chat/completions", chat.post),
        ]
    )
    return Runner(app, server)


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
