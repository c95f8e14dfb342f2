"""Replicas as a part of the command: ``callboard serve --replicas N``."""

import argparse
from typing import TYPE_CHECKING

from aiohttp import web

from engine.config import Config
from engine.types.errors import ConfigError
from engine.types.prompt import RequestPart
from server.extensions.replicas.held import HELD, blocks_part
from server.http.exchange import EXCHANGE
from server.proxy.affinity import PrefixAffinity, tenant_of
from server.run.extension import Extension, ServerParts, Serving

if TYPE_CHECKING:
    from engine.control.system import System


class ReplicasExtension(Extension):
    """Several engines of one model behind one router, or one of these engines."""

    def describe(self, system: "System") -> dict[str, bytes]:
        """Return whether the engine is a replica."""
        return {HELD: b"1"} if HELD in system.watchers else {}

    def join(self, parts: ServerParts) -> None:
        if HELD not in parts.backend.card.parts:
            return
        affinity, needs_key = PrefixAffinity(), parts.server.needs_key

        def parts_of(body: bytes, request: web.Request) -> dict[str, RequestPart]:
            tenant = tenant_of(request.headers, needs_key=needs_key)
            return blocks_part(affinity.blocks(body, tenant, request[EXCHANGE].offered_session))

        for route in parts.served.values():
            route.more_parts = parts_of

    def serving(self, parsed: argparse.Namespace, config: Config) -> Serving | None:
        if parsed.share_port and parsed.fleet is None:
            raise ConfigError("--share-port is for routers of one fleet; name it with --fleet")
        if parsed.own_port is not None and not parsed.share_port:
            raise ConfigError("--own-port is for a router that shares its port; set --share-port too, or server.port")
        if parsed.replicas is None and parsed.on is None and parsed.fleet is None:
            return None
        from server.extensions.replicas.ray_fleet import serve_on_ray

        if config.array:
            raise ConfigError(f"{parsed.target}: replicas are of one model, and it has [[{config.array}]]")
        if parsed.replicas is None:
            given = f"--on {parsed.on}" if parsed.fleet is None else f"--fleet {parsed.fleet}"
            raise ConfigError(f"{given} runs replicas; --replicas N says how many")
        ports = {"shares_port": parsed.share_port, "own_port": parsed.own_port}
        return Serving(lambda: serve_on_ray(config, parsed.replicas, parsed.fleet, **ports), "replicas", (config,))


EXTENSION = ReplicasExtension()
