"""Replicas as a part of the command: ``callboard serve --replicas N``."""

import argparse

from engine.config import Config, SeveralModels
from engine.types.errors import ConfigError
from server.run.extension import Extension, Serving


class ReplicasExtension(Extension):
    """Several engines of one model behind one router."""

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
