"""GET /server_info and /load: what a router or a person in need of help asks first.

Owns: what they say.  Does not know: the configuration as a whole, which is not a client's business.
"""

import msgspec
from aiohttp import web

from engine.config import LimitsSection
from engine.text.tool_format import ToolFormat
from server.backend import Ingress, Monitor
from server.http.replies import json_reply
from server.model_card import ModelCard


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """kv_tokens: how many tokens the KV pool holds; 0 while the model loads.  max_running: most rows of a step."""

    version: str
    model: str
    max_model_len: int
    vocab_size: int
    tool_format: ToolFormat
    kv_tokens: int
    kv_page_tokens: int
    max_running: int
    max_requests: int
    max_queued_tokens: int
    max_choices: int
    request_timeout_s: float


class Load(msgspec.Struct, frozen=True):
    """server_load: open requests, each choice counted.  running and waiting: of those in the engine."""

    server_load: int
    running: int
    waiting: int


class InfoRoutes:
    """Their handlers."""

    def __init__(
        self, ingress: Ingress, monitor: Monitor, card: ModelCard, limits: LimitsSection, version: str
    ) -> None:
        self._ingress = ingress
        self._monitor = monitor
        self._card = card
        self._limits = limits
        self._version = version

    async def info(self, request: web.Request) -> web.Response:
        """aiohttp's handler."""
        card, limits, gauges = self._card, self._limits, (await self._monitor.look()).gauges
        return json_reply(
            ServerInfo(
                version=self._version,
                model=card.name,
                max_model_len=card.max_model_len,
                vocab_size=card.vocab_size,
                tool_format=card.tool_format,
                kv_tokens=gauges.page_size * (gauges.pages_free + gauges.pages_cached + gauges.pages_used),
                kv_page_tokens=gauges.page_size,
                max_running=gauges.max_running,
                max_requests=limits.max_requests,
                max_queued_tokens=limits.max_queued_tokens,
                max_choices=limits.max_choices,
                request_timeout_s=limits.request_timeout_s,
            )
        )

    async def load(self, request: web.Request) -> web.Response:
        """aiohttp's handler."""
        gauges = (await self._monitor.look()).gauges
        return json_reply(Load(self._ingress.num_open, gauges.num_running, gauges.num_waiting))
