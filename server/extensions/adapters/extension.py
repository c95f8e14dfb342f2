"""Adapters as a part of the server."""

from collections.abc import Iterator

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.config import Config, SeveralModels
from engine.features.lora.files import adapter_rules
from engine.features.lora.settings import LoraSettings
from engine.plugins.families import read_model
from engine.types.errors import CallboardError, ConfigError
from server.run.extension import Extension
from server.run.finding import Finding


class AdaptersExtension(Extension):
    """Adapters, where lora.folder names their folder."""

    def check(self, config: Config, engines: str = "") -> None:
        if (folder := LoraSettings.of(config).folder) and isinstance(config, SeveralModels):
            raise ConfigError(f"lora.folder={folder}: adapters are of one model, and this file has [[models]]")

    def findings(self, config: Config) -> Iterator[Finding]:
        settings = LoraSettings.of(config)
        if not settings.folder:
            return
        try:
            spec = read_model(
                resolve_checkpoint(config.model.path, config.model.revision), config.plugins, config.model
            )
        except CallboardError:
            return  # the check of the model names the error
        try:
            rules = adapter_rules(spec.shape, settings.folder, settings.max_rank, config.model.numerics)
        except ConfigError as error:
            yield Finding("adapters", "bad", "a start refuses them", str(error))
        else:
            yield Finding("adapters", "good", f"served from {rules.folder}")


EXTENSION = AdaptersExtension()
