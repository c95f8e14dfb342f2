"""The part of the server that is always there: the OpenAI API and what operators need.

Owns: which handlers it has.  Does not know: what they do, how they are routed.
"""

from collections.abc import Mapping
from typing import ClassVar

from engine.checkpoints.use import Kind
from server.openai.chat import Chat
from server.openai.completions import CompletionsEndpoint
from server.openai.models import ModelRoutes
from server.openai.tokenization import TokenizationRoutes
from server.operators.administration import AdministrationRoutes
from server.operators.metrics import MetricsRoute
from server.operators.settings import SettingsRoutes
from server.operators.site import Site
from server.operators.stats import StatsRoute
from server.operators.status import ProbeRoute, StatusRoutes
from server.run.extension import Extension, FirstRequest, ServerParts, find_extensions
from server.run.openapi import OpenApiRoute


class Core(Extension):
    """The core, which brings what an extension may bring."""

    endpoints = (Chat, CompletionsEndpoint)
    first_requests: ClassVar[Mapping[Kind, FirstRequest]] = {
        "generate": (
            CompletionsEndpoint.operation.path,
            {"prompt": "def fibonacci(n):\n", "max_tokens": 48, "temperature": 0},
        )
    }
    handlers = (
        ModelRoutes,
        TokenizationRoutes,
        AdministrationRoutes,
        SettingsRoutes,
        StatusRoutes,
        ProbeRoute,
        StatsRoute,
        MetricsRoute,
        Site,
        OpenApiRoute,
    )

    def join(self, parts: ServerParts) -> None:
        server, backend, clients, version = parts.server, parts.backend, parts.clients, parts.version
        for handlers in (
            ModelRoutes(parts.translator),
            TokenizationRoutes(backend.codec, parts.translator, server),
            AdministrationRoutes(clients, server),
            SettingsRoutes(backend, server),
            StatusRoutes(backend, clients, version),
            ProbeRoute(clients, backend.card.use),
            StatsRoute(backend, clients, version=version, shows_text=not server.needs_key),
            MetricsRoute(backend, parts.traffic, version=version, more=parts.gauges, collectors=parts.collectors),
            Site(),
            OpenApiRoute(version, parts.operations),
        ):
            parts.routes.add(handlers)


def all_parts() -> tuple[Extension, ...]:
    """Returns the core and the extensions that are there."""
    return Core(), *find_extensions()
