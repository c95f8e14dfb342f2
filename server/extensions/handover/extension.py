"""Hand-overs as a part of the server and of the command: ``callboard serve --prefill N --decode M``."""

import argparse
from typing import TYPE_CHECKING

from aiohttp import web

from engine.config import Config
from engine.features.handover.messages import NAME
from engine.features.handover.terms import terms_of
from engine.types.errors import ConfigError
from engine.types.prompt import RequestPart
from server.extensions.handover.header import parts_of
from server.run.extension import Extension, ServerParts, Serving

if TYPE_CHECKING:
    from engine.control.system import System


class HandoverExtension(Extension):
    """Engines that compute prompts and engines that answer, behind one router, or one of these engines."""

    def describe(self, system: "System") -> dict[str, bytes]:
        """Return whether the engine hands pages over."""
        return {} if terms_of(system.engine.config) is None else {NAME: b"1"}

    def join(self, parts: ServerParts) -> None:
        if NAME not in parts.backend.card.parts:
            return
        for route in parts.served.values():
            more = route.more_parts

            def both(body: bytes, request: web.Request, more: object = more) -> dict[str, RequestPart]:
                return {**(more(body, request) if callable(more) else {}), **parts_of(request)}

            route.more_parts = both

    def serving(self, parsed: argparse.Namespace, config: Config) -> Serving | None:
        if parsed.prefill is None and parsed.decode is None:
            return None
        if any(one is not None for one in (parsed.replicas, parsed.on, parsed.fleet)):
            raise ConfigError(
                "--prefill and --decode run engines of this machine; leave out --replicas, --on and --fleet"
            )
        from server.extensions.handover.split import serve_split

        if config.array:
            raise ConfigError(f"{parsed.target}: a split engine serves one model, and it has [[{config.array}]]")
        num_prefill, num_decode = parsed.prefill or 1, parsed.decode or 1
        return Serving(lambda: serve_split(config, num_prefill, num_decode), "replicas", (config,))


EXTENSION = HandoverExtension()
