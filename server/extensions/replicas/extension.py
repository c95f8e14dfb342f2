"""Replicas as a part of the command: ``callboard serve --replicas N``."""

import argparse

from engine.config import Config, SeveralModels
from engine.types.errors import ConfigError
from server.arguments import count
from server.run.extension import Extension, Serving


class ReplicasExtension(Extension):
    """Several engines of one model behind one router."""

    def add_serve_arguments(self, serve: argparse.ArgumentParser) -> None:
        serve.add_argument("--replicas", type=count, metavar="N", help="serve N engines behind one router")
        on = "what runs the replicas: Ray, on all machines of its cluster (default: ray)"
        serve.add_argument("--on", choices=["ray"], help=on)

    def serving(self, parsed: argparse.Namespace, config: Config | SeveralModels) -> Serving | None:
        if parsed.replicas is None and parsed.on is None:
            return None
        from server.extensions.replicas.ray_fleet import serve_on_ray

        if isinstance(config, SeveralModels):
            raise ConfigError(f"{parsed.target}: replicas are of one model, and it has [[models]]")
        if parsed.replicas is None:
            raise ConfigError(f"--on {parsed.on} runs replicas; --replicas N says how many")
        return Serving(lambda: serve_on_ray(config, parsed.replicas), "replicas", (config,))


EXTENSION = ReplicasExtension()
